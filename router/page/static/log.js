// The messages on the screen. An answer grows in a text node; while it does, `aria-busy` keeps screen readers
// from reading it piece by piece.

import { count, h, ms } from "./dom.js";
import { indented } from "./conversation.js";
import { previewOf } from "./media.js";

const REASONS = { budget: "to fit the budget", load: "because the encoders are behind" };

export function showQuestion(log, text, attachments) {
  const files = attachments.map((each) => h("li", {}, previewOf(each)));
  log.append(
    h("li", { className: "turn question" },
      h("h3", { className: "unseen" }, "You"),
      ...(files.length ? [h("ul", { className: "files", "aria-label": "Files" }, ...files)] : []),
      ...(text ? [h("p", {}, text)] : [])),
  );
  log.scrollTop = log.scrollHeight;
}

/** One answer. `onLedger`: called with its timeline when its button is pressed. */
export class AnswerView {
  #log;
  #onLedger;
  #text = document.createTextNode("");
  #output = h("p", { className: "text" }, this.#text);
  #item = h("li", { className: "turn answer", "aria-busy": "true" },
    h("h3", { className: "unseen" }, "Answer"), this.#output);

  constructor(log, onLedger) {
    this.#log = log;
    this.#onLedger = onLedger;
    this.#append(log, this.#item);
  }

  add(text) {
    const follows = this.#isAtEnd();
    this.#text.appendData(text);
    if (follows) this.#log.scrollTop = this.#log.scrollHeight;
  }

  /** The answer is complete, or was stopped. `isJson`: it was asked for as JSON. */
  finish(answer, { isJson, isStopped }) {
    const pretty = isJson && indented(answer.text);
    if (pretty) this.#output.replaceWith(code("JSON", pretty));
    else if (!answer.text) this.#output.remove();
    for (const call of answer.toolCalls) this.#append(this.#item, toolCall(call));
    for (const note of answer.notes) this.#append(this.#item, h("p", { className: "quiet" }, noteText(note)));
    this.#append(this.#item, this.#footer(answer, isStopped));
    this.#item.removeAttribute("aria-busy");
  }

  fail(words) {
    if (!this.#text.data) this.#output.remove();
    this.#append(this.#item, h("p", { className: "error", role: "alert", "aria-label": "Error" }, words));
    this.#item.removeAttribute("aria-busy");
  }

  #footer({ text, toolCalls, finishReason, usage, ledger }, isStopped) {
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const facts = [
      ...(isStopped ? ["stopped"] : []),
      ...(finishReason === "length" ? ["cut off at the longest length"] : []),
      ...(!text && !toolCalls.length && !isStopped ? ["an empty answer"] : []),
      ...(ledger ? [`${ms(ledger.ttft_ms)} to the first token`] : []),
      ...(usage ? [count(usage.completion_tokens, "token"), `prompt ${usage.prompt_tokens}`] : []),
      ...(cached ? [`${cached} of them cached`] : []),
    ];
    const onclick = () => this.#onLedger(ledger);
    const show = h("button", { type: "button", className: "link", onclick }, "timeline");
    return h("p", { className: "quiet" }, facts.join(" · "), ...(ledger ? [" · ", show] : []));
  }

  #append(parent, child) {
    const follows = this.#isAtEnd();
    parent.append(child);
    if (follows) this.#log.scrollTop = this.#log.scrollHeight;
  }

  #isAtEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 40;
  }
}

function toolCall(call) {
  return h("figure", { className: "tool" },
    h("figcaption", {}, "calls ", h("code", {}, call.name)),
    code(`Arguments of ${call.name}`, indented(call.arguments) ?? call.arguments));
}

/** Can be reached with keys, because it may be wider than the screen. */
function code(label, text) {
  return h("pre", { tabIndex: 0, role: "region", "aria-label": label }, text);
}

function noteText({ item, modality, reason, num_tokens: num, error }) {
  const what = `${modality} ${item + 1}`;
  if (reason === "error") return `${what} was left out: ${error}`;
  return `${what} was reduced to ${count(num, "token")} ${REASONS[reason] ?? reason}`;
}
