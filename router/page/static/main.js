// Puts the page together: the form, one request at a time, and the panels beside it.

import { byId, h } from "./dom.js";
import { ApiError, chat, explain, getJson, key } from "./api.js";
import { attachmentOf, previewOf } from "./media.js";
import { Answer, Conversation } from "./conversation.js";
import { AnswerView, showQuestion } from "./log.js";
import { showLedger } from "./timeline.js";
import { watchPools } from "./pools.js";

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {
    shape: { enum: ["circle", "rectangle", "triangle"] },
    color: { enum: ["red", "green", "blue", "yellow", "black", "gray", "teal", "brown"] },
  },
  required: ["shape", "color"],
  additionalProperties: false,
};

const [prompt, log, send, notice] = ["prompt", "log", "send", "notice"].map(byId);
let conversation = new Conversation();
let attachments = [];
let model = null; // its name; null until the server has told
let running = null; // AbortController of the request in flight

// --- one request

async function ask() {
  const text = prompt.value.trim();
  if (!text && !attachments.length) return tell("Type a message or attach a file first.");
  let fields;
  try {
    fields = fieldsOfRequest();
  } catch (error) {
    return tell(error.message);
  }
  if (model === null && (!(await connect()) || running)) return;
  const asked = attachments;
  prompt.value = "";
  attach([]);
  tell("");
  showQuestion(log, text, asked);
  const error = await answer({ model, messages: conversation.messagesWith(text, asked), ...fields }, asked);
  if (!error?.isTemporary || prompt.value || attachments.length) return;
  prompt.value = text; // to be sent again
  attach(asked);
}

/** Returns the error that has ended it, if one has. */
async function answer(body, asked) {
  const view = new AnswerView(log, showTimeline);
  const own = conversation; // "New chat" may replace it meanwhile
  const result = new Answer();
  let failure = null;
  setRunning(new AbortController());
  try {
    for await (const chunk of chat(body, running.signal)) view.add(result.add(chunk));
    end(false);
  } catch (error) {
    if (running.signal.aborted) end(true);
    else {
      failure = error;
      view.fail(explain(error, own.namesWith(asked)));
      askForKey(error);
    }
  } finally {
    setRunning(null);
  }
  if (result.ledger) showTimeline(result.ledger);
  return failure;

  function end(isStopped) {
    view.finish(result, { isJson: "response_format" in body, isStopped });
    own.keep(body.messages, asked, result);
  }
}

function setRunning(controller) {
  running = controller;
  send.textContent = controller ? "Stop" : "Send";
  send.classList.toggle("stop", controller !== null);
}

const showTimeline = (ledger) => showLedger(byId("ledger"), ledger);

/** Raises an error in words if one of the two fields is no JSON object. */
function fieldsOfRequest() {
  const schema = jsonOf("schema", "The JSON schema");
  const format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return { ...jsonOf("fields", "The field for other fields"), ...(schema && { response_format: format }) };
}

function jsonOf(id, name) {
  const text = byId(id).value.trim();
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not valid JSON: ${error.message}`);
  }
  if (Object.prototype.toString.call(value) === "[object Object]") return value;
  throw new Error(`${name} must hold a JSON object.`);
}

// --- files

async function take(files) {
  const read = await Promise.allSettled([...files].map(attachmentOf));
  tell(read.filter(({ reason }) => reason).map(({ reason }) => reason.message).join(" "));
  attach([...attachments, ...read.filter(({ value }) => value).map(({ value }) => value)]);
}

function attach(items) {
  attachments = items;
  byId("attachments").replaceChildren(...items.map((item) => {
    const remove = () => {
      attach(attachments.filter((each) => each !== item));
      prompt.focus();
    };
    return h("li", {}, previewOf(item), h("span", {}, item.name),
      h("button", { type: "button", onclick: remove, "aria-label": `Remove ${item.name}` }, "×"));
  }));
}

function listenForFiles() {
  const drags = (event) => event.dataTransfer?.types.includes("Files");
  const setDropping = (is) => document.body.classList.toggle("dropping", is);
  addEventListener("dragover", (event) => {
    if (!drags(event)) return;
    event.preventDefault();
    setDropping(true);
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) setDropping(false); // it has left the window
  });
  addEventListener("drop", (event) => {
    if (!drags(event)) return;
    event.preventDefault();
    setDropping(false);
    take(event.dataTransfer.files);
  });
  addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  byId("files").addEventListener("change", ({ target }) => {
    take(target.files);
    target.value = ""; // so that the same file can be chosen again
  });
}

// --- the server and its key

async function connect() {
  try {
    const { data } = await getJson("v1/models");
    model = data[0].id;
    byId("model").textContent = model;
    document.title = `${model} – epdg`;
    return true;
  } catch (error) {
    byId("model").textContent = explain(error);
    askForKey(error);
    return false;
  }
}

function askForKey(error) {
  if (!(error instanceof ApiError) || error.status !== 401 || byId("key-dialog").open) return;
  byId("key-why").textContent = `${explain(error)} It is kept until this tab is closed.`;
  byId("key-dialog").showModal();
}

function listenForKey(onChanged) {
  const dialog = byId("key-dialog");
  const why = byId("key-why").textContent;
  byId("open-key").addEventListener("click", () => {
    byId("key-why").textContent = why;
    dialog.showModal();
  });
  byId("cancel-key").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(byId("key").value.trim());
    byId("key").value = "";
    dialog.close();
    onChanged();
  });
}

// --- start

function tell(words) {
  notice.textContent = words;
}

function listen() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else ask();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) ask();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key-dialog").open) running?.abort();
  });
  byId("clear").addEventListener("click", () => {
    running?.abort();
    conversation = new Conversation();
    log.replaceChildren();
    tell("");
    prompt.focus();
  });
  byId("example").addEventListener("click", () => {
    byId("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
  });
}

listen();
listenForFiles();
connect();
let isLost = false; // the server did not answer the last time
const askPools = watchPools(byId("pools"), (error) => {
  if (error) byId("pools").replaceChildren(h("p", { className: "error" }, explain(error)));
  else if (isLost) connect();
  isLost = error !== null;
});
listenForKey(() => {
  connect();
  askPools();
});
