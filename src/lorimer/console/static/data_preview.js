// What a check of training data found: counts, problems, and the first examples with the tokens that are trained on.

import { facts, h, short, table } from "./dom.js";

export const PROBLEMS = {
  form: "wrong form",
  nothing_trained: "nothing trained on",
  truncated: "cut off",
  duplicate: "duplicates",
  leak: "held out, but trained on",
};
const MAX_FINDINGS = 20;

/** Build the report of `/api/v1/data/check`. */
export function dataPreview(report) {
  const problems = Object.entries(report.problems).map(([name, count]) => `${count} ${PROBLEMS[name] || name}`);
  const lengths = Object.entries(report.lengths).map(([name, value]) => `${name} ${value}`);
  return h(
    "div",
    { class: "spaced", "data-report": report.form },
    facts([
      ["Rows", `${short(report.num_rows)}, of which ${short(report.num_held_out)} are held out`],
      ["Examples", short(report.num_examples)],
      ["Tokens", `${short(report.num_tokens)}, of which ${short(report.num_trained_tokens)} are trained on`],
      ["Lengths", lengths.join(", ")],
      ["Problems", problems.length ? problems.join(", ") : "none"],
    ]),
    report.findings.length > 0 && findingTable(report.findings),
    report.previews.length > 0 &&
      h("p", { class: "muted" }, "The first examples; tokens with a green ground are trained on."),
    report.previews.map(example),
  );
}

function findingTable(findings) {
  const columns = [
    { label: "Problem", value: (one) => PROBLEMS[one.problem] || one.problem },
    { label: "Row", number: true, value: (one) => (one.file === "data" ? one.row : `${one.row} of held-out rows`) },
    { label: "What", wide: true, value: (one) => one.text },
  ];
  return table(columns, findings.slice(0, MAX_FINDINGS));
}

function example(spans) {
  const token = (span) => (piece, place) =>
    h("span", { class: `data-token${span.is_trained ? " trained" : ""}${place % 2 ? " odd" : ""}` }, piece);
  return h(
    "pre",
    { class: "data-example", tabindex: "0" },
    spans.map((span) => span.pieces.map(token(span))),
  );
}
