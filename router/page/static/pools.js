// The pools as the door knows them (`/pools`), asked for once a second while this page is visible.

import { bytes, count, h } from "./dom.js";
import { getJson } from "./api.js";

const EVERY_MS = 1000;
const UNITS = { encode: "row", encode_prefill: "token", prefill: "token" }; // others count sequences
const SENT = { encode: "embeddings", prefill: "KV" }; // other pools send both

/** `onError`: called with what went wrong, and with null when the server answers again. */
export function watchPools(panel, onError) {
  let timer = null;
  let asking = null;
  let before = null; // the last report, with the time: bytes sent since then are a rate

  async function ask() {
    const own = (asking = new AbortController());
    try {
      const report = await getJson("pools", AbortSignal.any([own.signal, AbortSignal.timeout(10_000)]));
      const now = { at: performance.now(), sent: sentBytes(report.pools) };
      panel.replaceChildren(...shown(report, before, now));
      before = now;
      onError(null);
    } catch (error) {
      if (own.signal.aborted) return;
      before = null;
      onError(error);
    }
    timer = setTimeout(ask, EVERY_MS);
  }

  function update() {
    clearTimeout(timer);
    asking?.abort();
    if (!document.hidden) ask();
  }

  document.addEventListener("visibilitychange", update);
  update();
  return update; // asks at once
}

/** Name of a worker → bytes that it has sent to other workers since its start. */
function sentBytes(pools) {
  return new Map(pools.flatMap(({ workers }) => workers.map(({ name, sent_bytes: sent }) => [name, sent])));
}

function shown({ num_running: running, num_waiting: waiting, pools }, before, now) {
  const rate = (name) => {
    const sent = now.sent.get(name) - (before?.sent.get(name) ?? Infinity);
    return sent > 0 ? (1000 * sent) / (now.at - before.at) : 0;
  };
  const words = `Door: ${count(running, "request")} in flight, ${waiting} waiting for admission`;
  return [
    h("p", { className: "quiet" }, words),
    ...pools.map((pool) => poolView(pool, rate)),
  ];
}

function poolView({ role, workers }, rate) {
  const what = SENT[role] ?? "embeddings and KV";
  const views = workers.map((worker) => workerView(worker, what, rate(worker.name)));
  const none = h("li", { className: "error" }, "no worker: requests wait for one to join");
  return h("section", { className: `pool ${role}`, "aria-label": `Pool ${role}` },
    h("h3", {}, role.replace("_", " + ")),
    h("ul", {}, ...(views.length ? views : [none])));
}

function workerView({ name, is_listed: listed, is_avoided: avoided, parts, ...worker }, what, rate) {
  const state = !listed ? "leaving" : avoided ? "avoided: it makes no progress" : "";
  const sent = worker.sent_bytes ? `has sent ${bytes(worker.sent_bytes)} of ${what}` : "";
  const sends = rate ? `sends ${bytes(rate)}/s of ${what}` : sent;
  return h("li", { className: state ? "worker troubled" : "worker" },
    h("p", {}, h("span", {}, name, state && ` (${state})`), h("span", { className: "sending" }, sends)),
    ...parts.map(partView));
}

function partView(part) {
  const { num_running: running, num_waiting: waiting, num_queued_units: queued } = part;
  const words = [`${running} in flight`, `${waiting} waiting`];
  if (queued) words.push(`${count(queued, UNITS[part.part] ?? "sequence")} to do`);
  if (part.part === "encode") {
    words.push(`${part.num_encoded} encoded`, `${part.num_cached_items} from the cache`);
  }
  const bar = part.num_blocks ? memory(part) : [];
  return h("div", {}, h("p", { className: "quiet" }, words.join(", ")), ...bar);
}

function memory({ num_blocks: all, num_used_blocks: used, num_cached_blocks: cached }) {
  const bars = [["used", used], ["cached", cached]].map(([name, number]) => {
    const bar = h("span", { className: name });
    bar.style.width = number ? `max(2px, ${(100 * number) / all}%)` : "0";
    return bar;
  });
  return [
    h("div", { className: "memory", "aria-hidden": "true" }, ...bars),
    h("p", { className: "quiet" }, `${used} of ${all} blocks in use, ${cached} cached`),
  ];
}
