// What has been said so far, and one answer as it grows. No DOM.

import { partOf } from "./media.js";

export class Conversation {
  #turns = []; // { names, messages }: only those that were answered

  /** The messages of a request that asks `text` about `attachments` next. */
  messagesWith(text, attachments) {
    const parts = [...attachments.map(partOf), ...(text ? [{ type: "text", text }] : [])];
    const question = { role: "user", content: attachments.length ? parts : text };
    return [...this.#turns.flatMap((turn) => turn.messages), question];
  }

  /** Of all files of that request, in the order in which the server counts them. */
  namesWith(attachments) {
    return [...this.#turns.flatMap((turn) => turn.names), ...attachments.map(({ name }) => name)];
  }

  /** An answer that calls tools is not kept: without their results the model cannot go on from it. */
  keep(messages, attachments, answer) {
    if (!answer.text || answer.toolCalls.length) return;
    const names = attachments.map(({ name }) => name);
    this.#turns.push({ names, messages: [messages.at(-1), { role: "assistant", content: answer.text }] });
  }
}

export class Answer {
  text = "";
  toolCalls = []; // { name, arguments }
  finishReason = null;
  usage = null;
  ledger = null;
  notes = []; // what the server changed in the media

  /** Returns the text that this chunk of the stream adds. */
  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.ledger = chunk.ledger?.[0] ?? this.ledger;
    this.notes = chunk.media ?? this.notes;
    const [choice] = chunk.choices ?? [];
    const added = choice?.delta?.content ?? "";
    this.text += added;
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    for (const call of choice?.delta?.tool_calls ?? []) this.#addCall(call);
    return added;
  }

  #addCall({ index = 0, function: piece = {} }) {
    const call = (this.toolCalls[index] ??= { name: "", arguments: "" });
    call.name += piece.name ?? "";
    call.arguments += piece.arguments ?? "";
  }
}

/** `text` as indented JSON; null if it is none. */
export function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}
