// What a run is: its status, progress, notes, lineage and configuration, and the actions that change it.

import { del, part, send } from "./api.js";
import { ago, button, confirmDialog, facts, formDialog, h, runLink, short, span, table, toast } from "./dom.js";
import { labels, progress, statusBadge } from "./pages/runs.js";
import { runHealth } from "./run_health.js";

const pathOf = (run) => `/api/v1/runs/${part(run.run_id)}`;

/** Build the buttons of a run; `changed(run)` is called after a change, `gone()` after it was deleted. */
export function runActions(run, changed, gone) {
  const act = async (work) => {
    try {
      await work();
    } catch (error) {
      if (error.status !== 401) toast(error.message, "bad");
    }
  };
  const patch = (body) => act(async () => changed(await send("PATCH", pathOf(run), { body })));
  const edit = async () => {
    const answer = await formDialog({
      title: "Edit run",
      fields: [
        { name: "name", label: "Name", value: run.name, required: true },
        { name: "tags", label: "Tags", value: run.tags.join(", "), hint: "Separated by commas" },
        { name: "notes", label: "Notes", value: run.notes, type: "textarea" },
      ],
    });
    if (!answer) return;
    const tags = answer.tags.split(",").map((tag) => tag.trim());
    await patch({ name: answer.name.trim(), notes: answer.notes, tags: tags.filter(Boolean) });
  };
  const remove = async () => {
    const isSure = await confirmDialog({
      title: `Delete ${run.name}?`,
      text: "The run is deleted with all its metrics and checkpoints. This cannot be undone.",
      action: "Delete",
      danger: true,
    });
    if (isSure) await act(async () => (await del(pathOf(run)), gone()));
  };
  return [
    button("Edit", edit, { class: "quiet small" }),
    button(run.is_archived ? "Unarchive" : "Archive", () => patch({ is_archived: !run.is_archived }), {
      class: "quiet small",
    }),
    button("Delete run", remove, {
      class: "quiet small danger",
      disabled: run.status === "running",
      title: run.status === "running" ? "A run that is running cannot be deleted" : null,
    }),
  ];
}

/** Build the panel of a run's status, progress, labels and lineage. */
export function runFacts(run) {
  const remaining = run.eta_seconds ? `${span(run.eta_seconds)} left` : null; // none during a last evaluation
  return h(
    "div",
    { "data-row": "run" },
    facts([
      ["Status", [statusBadge(run), run.is_archived && " archived"]],
      ["Steps", progress(run) && [progress(run), remaining && h("small", null, ` · ${remaining}`)]],
      ["Duration", span(run.duration_seconds)],
      ["Tags", run.tags.length || run.user_metadata ? labels(run) : null],
      ["Started from", run.parent_path && origin(run)],
      ["Continued by", run.children.length ? links(run.children) : null],
      ["Parts", run.parts.length > 1 ? parts(run) : null],
    ]),
    run.error && h("p", { class: "run-error", role: "status" }, run.error),
    run.notes && h("p", { class: "run-notes" }, run.notes),
    runHealth(run),
  );
}

const origin = (run) =>
  h("span", null, run.parent && [runLink(run.parent.run_id, run.parent.name), " "], h("small", { class: "mono" }, run.parent_path));

const links = (found) => h("span", { class: "row" }, found.map(({ run_id: id, name }) => runLink(id, name)));

function parts(run) {
  return h(
    "ol",
    { class: "parts" },
    run.parts.map((one, n) =>
      h(
        "li",
        { title: one.training_run_id },
        n ? "resumed " : "began ",
        ago(one.created_at),
        one.first_step !== null && n > 0 && ` at step ${short(one.first_step)}`,
      ),
    ),
  );
}

/** Return the fields of a configuration as pairs; those of nested objects are called `outer.inner`. */
export function flatten(config, prefix = "") {
  return Object.entries(config).flatMap(([name, value]) =>
    value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flatten(value, `${prefix}${name}.`)
      : [[`${prefix}${name}`, typeof value === "string" ? value : JSON.stringify(value)]],
  );
}

/** Return the names of the fields in which configurations differ. */
export function differing(runs) {
  const flat = runs.map((run) => new Map(flatten(run.config)));
  const names = [...new Set(flat.flatMap((one) => [...one.keys()]))];
  return names.filter((name) => new Set(flat.map((one) => one.get(name))).size > 1).sort();
}

/** Build the table of the fields in which runs differ. */
export function differences(runs) {
  const names = differing(runs);
  if (!names.length) return h("p", { class: "muted" }, "The configurations of these runs are the same.");
  const flat = new Map(runs.map((run) => [run.run_id, new Map(flatten(run.config))]));
  return table(
    [
      { label: "Run", wide: true, value: (run) => runLink(run.run_id, run.name) },
      ...names.map((name) => ({ label: name, value: (run) => flat.get(run.run_id).get(name) ?? "–" })),
    ],
    runs,
    (run) => ({ "data-row": `difference ${run.run_id}` }),
  );
}
