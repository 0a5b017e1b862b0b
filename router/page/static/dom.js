// Elements from plain values. Strings become text nodes, so nothing that a model, a file name or the server
// says is ever markup; the page's Content-Security-Policy forbids the rest.

export const byId = (id) => document.getElementById(id);

/** `h("p", { className: "quiet" }, "text", element)`; names with a dash, and `role`, are attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "role" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

const SCALES = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

export function bytes(number) {
  const [unit, scale] = SCALES.find(([, least]) => number >= least) ?? ["B", 1];
  return `${(number / scale).toFixed(scale > 1 ? 1 : 0)} ${unit}`;
}

export const ms = (number) => `${number.toFixed(number < 10 ? 2 : number < 100 ? 1 : 0)} ms`;

export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
