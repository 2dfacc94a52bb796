// Files that the browser saves and opens for the user.

import { h } from "./dom.js";

/** Save a blob under a name. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Let the user choose a file. Return `{name, text}`, or null if none was chosen. */
export function openFile(accept) {
  return new Promise((resolve, reject) => {
    const field = h("input", {
      type: "file",
      accept,
      oncancel: () => resolve(null),
      onchange: () => {
        const [file] = field.files;
        file.text().then((text) => resolve({ name: file.name, text }), reject);
      },
    });
    field.click();
  });
}
