// Where the time of one request went: the `ledger` of its answer (docs/operations.md) as bars. The stages
// follow each other on the critical path. What encoders did for a media item lies beside it.

import { h, ms } from "./dom.js";

// Stage → what a reader calls it, and the part of the cluster whose colour its bar has
const STAGES = {
  fetch: ["Media, schema", "door"],
  probe: ["Headers and prompt", "door"],
  admission: ["Admission", "door"],
  route: ["Placement", "door"],
  prefill_blocks: ["Blocks at prefill", "prefill"],
  encode_queue: ["Wait for an encoder", "encode"],
  encode: ["Encode", "encode"],
  embedding_transfer: ["Embeddings → prefill", "wire"],
  prefill_queue: ["Prefill queue", "prefill"],
  prefill: ["Prefill", "prefill"],
  delivery: ["Messages", "door"],
  kv_transfer: ["KV → decode", "wire"],
  first_step: ["First decode step", "decode"],
};
const OF_ITEM = { prepare: "encode", queue: "encode", encode: "encode", target: "wire", transfer: "wire" };

export function showLedger(panel, ledger) {
  const stages = Object.entries(ledger.actual_ms ?? {}).filter(([, took]) => took > 0);
  const end = Math.max(stages.reduce((sum, [, took]) => sum + took, 0), ledger.predicted_ms?.ttft ?? 0);
  const scale = 100 / (end || 1);
  let at = 0;
  const rows = stages.map(([stage, took]) => {
    const [name, part] = STAGES[stage] ?? [stage, "door"];
    const bar = barOf(part, at * scale, took * scale);
    at += took;
    return row(name, took, bar);
  });
  panel.replaceChildren(
    headline(ledger),
    h("table", { className: "bars" },
      h("caption", { className: "unseen" }, "Stages of the request, in order, in milliseconds"),
      h("thead", { className: "unseen" }, heads("Stage", "Share of the time", "Took")),
      h("tbody", {}, ...rows, ...predictedRow(ledger, scale))),
    ...itemsTable(ledger.items_ms ?? []),
    ...pathOf(ledger.placement),
  );
}

function headline({ ttft_ms: ttft, predicted_ms: predicted }) {
  const { ttft: guess, low, high } = predicted ?? {};
  const guessed = predicted ? `; predicted ${ms(guess)}, between ${ms(low)} and ${ms(high)}` : "";
  return h("p", {}, h("strong", {}, ms(ttft)), ` to the first token${guessed}`);
}

function predictedRow({ predicted_ms: predicted }, scale) {
  if (!predicted) return [];
  const bar = barOf("predicted", predicted.low * scale, (predicted.high - predicted.low) * scale);
  return [row("Predicted first token", predicted.ttft, bar)];
}

function itemsTable(items) {
  if (!items.length) return [];
  const steps = Object.keys(OF_ITEM);
  const longest = Math.max(...items.map((item) => steps.reduce((sum, step) => sum + item[step], 0))) || 1;
  const rows = items.map((item) => {
    let at = 0;
    const bars = steps.map((step) => {
      const bar = barOf(OF_ITEM[step], (100 * at) / longest, (100 * item[step]) / longest);
      bar.title = `${step} ${ms(item[step])}`;
      at += item[step];
      return bar;
    });
    return row(`File ${item.item + 1}${item.cached ? ", from the cache" : ""}`, at, ...bars);
  });
  return [
    h("table", { className: "bars" },
      h("caption", {}, "Files at their encoders"),
      h("thead", { className: "unseen" }, heads("File", "Steps", "Took")),
      h("tbody", {}, ...rows)),
  ];
}

/** Which workers it went through. The server names them only with `door.show_workers`. */
function pathOf(placement) {
  if (!placement) return [];
  const { encoders, prefill, decode, codec } = placement;
  const isLocal = prefill === decode;
  const senders = [...new Set(encoders)].filter((encoder) => encoder !== prefill);
  const steps = [
    ...senders.map((encoder) => `${encoder} sends embeddings to ${prefill}`),
    isLocal ? `${decode} computes prompt and answer` : `${prefill} sends KV (${codec}) to ${decode}`,
  ];
  return [h("ul", { className: "path", "aria-label": "Workers" }, ...steps.map((step) => h("li", {}, step)))];
}

const heads = (...names) => h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)));

function row(name, took, ...bars) {
  return h("tr", {},
    h("th", { scope: "row" }, name),
    h("td", {}, h("div", { className: "track", "aria-hidden": "true" }, ...bars)),
    h("td", { className: "number" }, ms(took)));
}

function barOf(part, from, width) {
  const bar = h("span", { className: `bar ${part}` });
  bar.style.setProperty("--from", `${from}%`);
  bar.style.setProperty("--width", `${width}%`);
  return bar;
}
