// Lists failed requests with their error texts, newest first.

import { ago, empty, h, runLink, table } from "./dom.js";

export function errorTable(errors) {
  if (!errors.length) return empty("No errors.", "Your failed operations are listed here, newest first.");
  return table(
    [
      { label: "When", class: "tight", value: (row) => ago(row.at) },
      {
        label: "What",
        value: (row) => [row.kind === "rejected" ? "rejected request" : row.kind, row.run_id && [" of ", runLink(row.run_id)]],
      },
      {
        label: "Error",
        wide: true,
        value: (row) => [
          row.category && h("span", { class: "tag" }, row.category),
          " ",
          h("span", { class: "error-text" }, row.error),
        ],
      },
    ],
    errors,
    (row) => ({ "data-row": `${row.at} ${row.run_id} ${row.kind}` }),
  );
}
