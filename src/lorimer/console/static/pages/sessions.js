// Lists sessions, one per client program, with their runs, last heartbeat and end state; and downloads a trace of their
// requests.

import { downloadSigned, get, part, post } from "../api.js";
import {
  ago,
  badge,
  button,
  bytes,
  choice,
  commandBlock,
  copyButton,
  empty,
  facts,
  h,
  moment,
  pageHead,
  panel,
  replace,
  runLink,
  searchBox,
  table,
  toast,
} from "../dom.js";
import { errorTable } from "../error_table.js";
import { trainingProgram } from "../getting_started.js";
import { redraw, whenChanged } from "../redraw.js";

export const title = "Sessions";

const PER_PAGE = 50;
const SILENT_SECONDS = 60; // clients send a heartbeat every ten
const MAX_MEMBERS = 50;
const STATUSES = [
  ["", "every status"],
  ["active", "active"],
  ["success", "finished"],
  ["errored", "errored"],
  ["interrupted", "interrupted"],
  ["cancelled", "cancelled"],
];

export async function render(root, context) {
  return context.params.session ? renderOne(root, context) : renderAll(root, context);
}

// ── all ─────────────────────────────────────────────────────────────────────────────────────────────

async function renderAll(root, { query, signal, live, setQuery }) {
  const filter = { text: query.get("q") || "", status: query.get("status") || "" };
  let numPages = 1;
  const list = h("div", null);
  const draw = whenChanged(({ sessions, hasMore }) =>
    redraw(
      list,
      sessions.length ? sessionTable(sessions) : nothing(filter),
      hasMore && button("Show more", () => ((numPages += 1), reload())),
    ),
  );
  let number = 0;
  const load = async () => {
    const mine = ++number;
    const found = await loadPages(filter, numPages, signal);
    if (mine === number) draw(found); // ignore the response to an older query
  };
  const reload = () => load().catch((error) => signal.aborted || toast(error.message, "bad"));
  const choose = (values) => {
    Object.assign(filter, values);
    numPages = 1;
    setQuery({ q: filter.text, status: filter.status });
    reload();
  };
  root.append(pageHead("Sessions"), panel(null, filters(filter, choose), list));
  await live(load, 5);
}

function filters(filter, choose) {
  return h(
    "div",
    { class: "row" },
    searchBox("Search sessions", "Words of the name, or an id", filter.text, (text) => choose({ text: text.trim() })),
    choice("Status", STATUSES, filter.status, (status) => choose({ status })),
  );
}

async function loadPages({ text, status }, numPages, signal) {
  const isReason = ["success", "errored", "interrupted"].includes(status);
  const statuses = status ? [isReason ? { type: "client_finished", reasons: [status] } : { type: status }] : null;
  const wanted = {
    limit: PER_PAGE,
    ...(statuses && { statuses }),
    ...(text && { session_id: text, display_name: text }),
  };
  const sessions = [];
  let cursor = null;
  for (let i = 0; i < numPages && (i === 0 || cursor); i++) {
    const page = await post("/api/v1/sessions/search", { ...wanted, ...(cursor && { cursor }) }, signal);
    sessions.push(...page.sessions.map(withSilence));
    cursor = page.next_cursor;
  }
  return { sessions, hasMore: cursor !== null };
}

/** Return the state of a session; an unfinished one without a recent heartbeat is silent. */
function withSilence(session) {
  return {
    ...session,
    isSilent: session.status?.type === "active" && Date.now() - moment(session.last_seen_at) > SILENT_SECONDS * 1000,
  };
}

function sessionTable(sessions) {
  const columns = [
    {
      label: "Session",
      wide: true,
      value: (s) =>
        h(
          "div",
          { class: "stack" },
          sessionLink(s),
          s.display_name && h("small", { class: "mono session-id", title: s.session_id }, s.session_id),
        ),
    },
    { label: "Status", value: (s) => [statusBadge(s), statusDetail(s)] },
    { label: "Runs", number: true, value: (s) => s.training_runs_count },
    {
      label: "Checkpoints",
      number: true,
      value: (s) => (s.checkpoints_count ? `${s.checkpoints_count} (${bytes(s.checkpoint_storage_bytes)})` : "0"),
    },
    { label: "Tags", value: (s) => tags(s) },
    { label: "Heartbeat", class: "tight", value: (s) => ago(s.last_seen_at) },
    { label: "Started", class: "tight", value: (s) => ago(s.created_at) },
    { label: "", value: (s) => traceButton(s.session_id, "Trace") },
  ];
  return table(columns, sessions, (s) => ({ "data-row": s.session_id }));
}

function sessionLink({ session_id: id, display_name: name }) {
  const attrs = { class: name ? null : "mono session-id", href: `/console/sessions/${part(id)}`, title: id };
  return h("a", attrs, name || id);
}

function tags(session) {
  const metadata = Object.entries(session.user_metadata || {}).map(([name, value]) => `${name}: ${value}`);
  const shown = [...(session.tags || []), ...metadata];
  return shown.length
    ? h(
        "div",
        { class: "row tags" },
        shown.map((one) => h("span", { class: "tag" }, one)),
      )
    : "";
}

function statusBadge({ status, isSilent }) {
  if (!status) return badge("idle", "unknown");
  if (status.type === "active") return isSilent ? badge("warn", "silent") : badge("ok", "active");
  if (status.type === "client_finished") {
    return (
      { success: badge("idle", "finished"), interrupted: badge("warn", "interrupted") }[status.reason.type] ||
      badge("bad", status.reason.type)
    );
  }
  return badge(status.type === "failed" ? "bad" : "idle", status.type);
}

const statusDetail = ({ status }) => status?.detail && h("div", { class: "error-text" }, status.detail);

function nothing({ text, status }) {
  if (text || status) return empty("Nothing matches.", "Names are searched by words, ids as a whole.");
  return empty("There are no sessions yet.", "Every client program creates one. Create the first with:", trainingProgram());
}

// ── trace ───────────────────────────────────────────────────────────────────────────────────────────

function traceButton(sessionId, label) {
  return button(
    label,
    async () => {
      try {
        const { status, url, error } = await get(`/api/v1/sessions/${part(sessionId)}/trace_export`);
        if (status !== "ready") throw new Error(error || `the trace is ${status}; try again in a moment`);
        await downloadSigned(url, `${sessionId}.json`);
      } catch (error) {
        if (error.status !== 401) toast(error.message, "bad");
      }
    },
    { class: "small", "aria-label": `Download the trace of ${sessionId}` },
  );
}

// ── one ─────────────────────────────────────────────────────────────────────────────────────────────

async function renderOne(root, { params, signal, live, setTitle }) {
  const id = params.session;
  const body = h("div", { class: "stack-wide" });
  const name = h("span", null, "Session");
  const draw = whenChanged((found) => redraw(body, details(found)));
  const load = async () => {
    const [members, { sessions }] = await Promise.all([
      get(`/api/v1/sessions/${part(id)}`, null, signal),
      post("/api/v1/sessions/search", { session_id: id, limit: 1 }, signal),
    ]);
    const [runs, samplers] = await Promise.all([
      loadMembers("training_runs", members.training_run_ids, signal),
      loadMembers("samplers", members.sampler_ids, signal),
    ]);
    replace(name, sessions[0].display_name || "Session");
    draw({ session: withSilence(sessions[0]), members, runs, samplers });
  };
  setTitle(`Session ${id}`);
  root.append(
    pageHead(
      [name, h("small", { class: "mono" }, id)],
      h("a", { href: "/console/sessions" }, "All sessions"),
      traceButton(id, "Download trace"),
      copyButton(id, "Copy id"),
    ),
    body,
  );
  await live(load, 5);
}

const loadMembers = (kind, ids, signal) =>
  Promise.all(
    ids
      .slice(-MAX_MEMBERS)
      .reverse()
      .map((id) => get(`/api/v1/${kind}/${part(id)}`, null, signal)),
  );

function details({ session, members, runs, samplers }) {
  const metadata = Object.entries(session.user_metadata || {});
  return [
    panel(
      "Session",
      facts([
        [
          "Status",
          h(
            "span",
            null,
            statusBadge(session),
            statusDetail(session),
          ),
        ],
        ["Heartbeat", ago(session.last_seen_at)],
        ["Started", ago(session.created_at)],
        ["Project", session.project_id],
        ["Checkpoints", `${session.checkpoints_count} (${bytes(session.checkpoint_storage_bytes)})`],
        [
          "Tags",
          session.tags?.length
            ? h(
                "span",
                { class: "row tags" },
                session.tags.map((tag) => h("span", { class: "tag" }, tag)),
              )
            : null,
        ],
      ]),
    ),
    metadata.length > 0 && panel("Metadata", facts(metadata)),
    members.errors.length > 0 && panel("Failed requests", errorTable(members.errors)),
    panel(
      heading("Runs", runs, members.training_run_ids),
      runs.length ? runTable(runs) : empty("This session has made no runs."),
    ),
    samplers.length > 0 && panel(heading("Samplers", samplers, members.sampler_ids), samplerTable(samplers)),
    panel(
      "Trace",
      h(
        "p",
        null,
        "When each request of this session arrived, waited and ran. The file opens at ui.perfetto.dev or chrome://tracing. In a terminal:",
      ),
      commandBlock(`lorimer session export-trace ${session.session_id} --base-url ${location.origin}`),
    ),
  ];
}

const heading = (name, shown, all) =>
  shown.length < all.length ? `${name}: the newest ${shown.length} of ${all.length}` : name;

function runTable(runs) {
  const columns = [
    {
      label: "Run",
      wide: true,
      value: (run) =>
        h(
          "div",
          { class: "stack" },
          runLink(run.training_run_id, run.run_name || run.training_run_id),
          run.run_name && h("small", { class: "mono" }, run.training_run_id),
        ),
    },
    { label: "Base model", value: (run) => run.base_model },
    { label: "Rank", number: true, value: (run) => run.lora_rank },
    { label: "State", value: (run) => (run.corrupted ? badge("bad", "cannot go on") : badge("ok", "usable")) },
    { label: "Last request", value: (run) => ago(run.last_request_time) },
  ];
  return table(columns, runs, (run) => ({ "data-row": run.training_run_id }));
}

function weightsOf({ model_path: path, model_id: run }) {
  if (run) return ["unsaved, of ", runLink(run)];
  return path ? h("span", { class: "mono" }, path) : "those of the base model";
}

function samplerTable(samplers) {
  const playground = (sampler) => `/console/playground?model=${part(sampler.model_path || sampler.base_model)}`;
  const columns = [
    { label: "Sampler", wide: true, class: "mono", value: (sampler) => sampler.sampler_id },
    { label: "Base model", value: (sampler) => sampler.base_model },
    { label: "Weights", value: weightsOf },
    {
      label: "",
      value: (sampler) => !sampler.model_id && h("a", { class: "button small", href: playground(sampler) }, "Try"),
    },
  ];
  return table(columns, samplers, (sampler) => ({ "data-row": sampler.sampler_id }));
}
