// Files become parts of a message. A file travels inside the request, as a data URI.

import { h } from "./dom.js";

const KINDS = ["image", "video", "audio"];

/** `{ kind, name, url }`. Raises an error in words for a file that is none of the three. */
export async function attachmentOf(file) {
  const kind = KINDS.find((each) => file.type.startsWith(`${each}/`));
  if (!kind) throw new Error(`${file.name} is no image, clip or sound that this browser knows.`);
  if (!file.size) throw new Error(`${file.name} is empty.`);
  return { kind, name: file.name || `pasted ${kind}`, url: await dataUri(file) };
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

export const partOf = ({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } });

export function previewOf({ kind, name, url }) {
  return kind === "image"
    ? h("img", { src: url, alt: name })
    : h(kind, { src: url, controls: true, "aria-label": name });
}
