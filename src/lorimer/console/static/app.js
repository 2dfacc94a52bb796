// The frame around the pages: routing, navigation without reloading, the signed-in user, the theme, and keyboard
// shortcuts. A page is a module with `title` and `render(root, context)`; aborting its signal ends it.

import { get, setKey } from "./api.js";
import { forgetAll } from "./conversation_files.js";
import { badge, button, empty, h, pageHead, replace, svg, toast } from "./dom.js";

const PAGES = [
  { path: "", module: "overview" },
  { path: "runs", module: "runs" },
  { path: "runs/:run", module: "run" },
  { path: "runs/:run/rollouts", module: "rollouts" },
  { path: "training_runs/:run", module: "run" }, // URLs of the SDK
  { path: "playground", module: "playground" },
  { path: "playground/prompts", module: "prompts" },
  { path: "checkpoints", module: "checkpoints" },
  { path: "checkpoints/:run/:checkpoint", module: "checkpoints" },
  { path: "checkpoints/:run/:segment/:name", module: "checkpoints" },
  { path: "evaluations", module: "evaluations" },
  { path: "trainings", module: "trainings" },
  { path: "sessions", module: "sessions" },
  { path: "sessions/:session", module: "sessions" },
  { path: "usage", module: "usage" },
  { path: "replicas", module: "replicas" },
  { path: "system", module: "system" },
  { path: "keys", module: "keys" },
  { path: "signin", module: "signin" },
];
const NAVIGATION = [
  ["", "Overview", "o", "M3 11 12 4l9 7v9h-6v-6H9v6H3z"],
  ["runs", "Runs", "r", "M3 4v16h18M6 15l4-5 4 3 6-8"],
  ["playground", "Playground", "p", "M4 5h16v11H9l-5 4z"],
  ["checkpoints", "Checkpoints", "c", "M5 3h11l3 3v15H5zM8 3v6h7V3M8 21v-7h8v7"],
  ["evaluations", "Evaluations", "v", "M4 5h16v15H4zM4 10h16M10 5v15M13 15l2 2 3-4"],
  ["trainings", "Train", "t", "M5 4l14 8-14 8z"],
  ["sessions", "Sessions", "s", "M3 5h18v11H3zM8 20h8M12 16v4"],
  ["usage", "Usage", "u", "M4 20V10M10 20V4M16 20v-7M21 20H3"],
  ["replicas", "Replicas", "e", "M4 4h16v6H4zM4 14h16v6H4zM8 7h2M8 17h2"],
  ["system", "System", "m", "M3 12h4l3-8 4 16 3-8h4"],
  ["keys", "Keys", "k", "M14.500 9.500a4 4 0 1 0-3 3.900L14 16h2v2h2v2h3v-3l-6.600-6.600z"],
];
const NUM_ALWAYS_SHOWN = 4; // on a phone the others are under "More"
const THEMES = ["system", "light", "dark"];

const main = document.getElementById("main");
let leaving = new AbortController();
let account = null;

// ── pages ───────────────────────────────────────────────────────────────────────────────────────────

/** Match a path to a page and its parameters; `/` and `/console` are the overview. */
function match(pathname) {
  const parts = pathname
    .replace(/^\/(console(\/|$))?/, "")
    .replace(/\/$/, "")
    .split("/")
    .map(decoded);
  for (const page of PAGES) {
    const names = page.path.split("/");
    if (names.length !== parts.length || !names.every((name, i) => name.startsWith(":") || name === parts[i])) continue;
    const params = Object.fromEntries(
      names.flatMap((name, i) => (name.startsWith(":") ? [[name.slice(1), parts[i]]] : [])),
    );
    return { page, params };
  }
  return null;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Show the page of the current URL. */
async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const found = match(location.pathname);
  markNavigation(found?.page.module);
  document.getElementById("nav").classList.remove("open");
  const root = h("div", { class: "page", "data-page": found?.page.module || "none" });
  replace(main, root);
  if (!found) {
    root.append(
      pageHead("No such page"),
      empty("Page not found.", "Choose a page from the navigation."),
    );
    return;
  }
  root.setAttribute("aria-busy", "true");
  try {
    const module = await import(`./pages/${found.page.module}.js`);
    if (signal.aborted) return;
    setTitle(module.title);
    await module.render(root, contextOf(found, root, signal));
  } catch (error) {
    if (signal.aborted || error.status === 401) return;
    console.info("page failed", error);
    const hint = error.status === 404 ? null : "The server's log may say more.";
    replace(root, pageHead("This page cannot be shown", button("Try again", show)), empty(error.message, hint));
  } finally {
    root.removeAttribute("aria-busy");
  }
}

function contextOf(found, root, signal) {
  return {
    params: found.params,
    query: new URLSearchParams(location.search),
    signal,
    account,
    live: (work, seconds) => live(work, seconds, signal),
    navigate,
    setTitle,
    /** Replace query parameters of the URL without a new history entry; null removes one. */
    setQuery(values) {
      if (signal.aborted) return;
      const query = new URLSearchParams(location.search);
      for (const [name, value] of Object.entries(values)) {
        if (value === null || value === undefined || value === "") query.delete(name);
        else query.set(name, value);
      }
      const text = query.toString();
      history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
    },
  };
}

function setTitle(title) {
  document.title = title ? `${title} · Lorimer` : "Lorimer";
}

/** Go to a page of the console. */
export function navigate(path, { replaceEntry = false } = {}) {
  history[replaceEntry ? "replaceState" : "pushState"](null, "", path);
  window.scrollTo(0, 0);
  const shown = show();
  shown.then(() => main.querySelector("h1")?.focus({ preventScroll: true }));
  return shown;
}

/**
 * Poll: run a function now, and again `seconds` after each run, until the page is left; hidden tabs pause. The caller
 * awaits the first run and its errors; later errors are shown as a lost connection and retried.
 */
async function live(work, seconds, signal) {
  await work();
  const repeat = async () => {
    while (!signal.aborted) {
      await pause(seconds, signal);
      if (signal.aborted) return;
      try {
        await work();
        setConnected(true);
      } catch (error) {
        if (signal.aborted || error.status === 401) return;
        setConnected(false, error.message);
      }
    }
  };
  repeat();
}

function pause(seconds, signal) {
  return new Promise((resolve) => {
    const finish = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", finish);
      resolve();
    };
    const timer = setTimeout(() => {
      if (document.hidden) document.addEventListener("visibilitychange", finish);
      else resolve();
    }, seconds * 1000);
    signal.addEventListener("abort", () => (clearTimeout(timer), finish()), { once: true });
  });
}

// ── the frame ───────────────────────────────────────────────────────────────────────────────────────

function drawNavigation() {
  const link = ([path, label, letter, icon]) =>
    h(
      "a",
      { href: path ? `/console/${path}` : "/", "data-module": path || "overview", title: `${label} (g ${letter})` },
      svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: icon })),
      h("span", null, label),
    );
  const nav = document.getElementById("nav");
  const more = button("More", () => more.setAttribute("aria-expanded", String(nav.classList.toggle("open"))), {
    class: "more",
    "aria-expanded": "false",
    "aria-controls": "more-pages",
  });
  replace(
    nav,
    NAVIGATION.slice(0, NUM_ALWAYS_SHOWN).map(link),
    h("div", { id: "more-pages" }, NAVIGATION.slice(NUM_ALWAYS_SHOWN).map(link)),
    more,
  );
}

function markNavigation(module) {
  const shown = { run: "runs", rollouts: "runs", prompts: "playground" }[module] ?? module;
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.dataset.module === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function drawTop() {
  replace(
    document.getElementById("top"),
    h("a", { href: "/", class: "brand" }, h("span", { class: "mark", "aria-hidden": "true" }), "Lorimer"),
    h("span", { id: "connection", role: "status" }),
    h(
      "div",
      { class: "account" },
      themeButton(),
      account?.name && h("span", { class: "who", title: account.user_id }, account.name),
      account?.needs_key && button("Sign out", signOut, { class: "quiet small" }),
    ),
  );
}

function setConnected(isConnected, reason = "") {
  const place = document.getElementById("connection");
  if (isConnected !== Boolean(place.firstChild)) return;
  replace(place, isConnected ? null : h("span", { title: reason }, badge("bad", "connection lost, trying again")));
}

/** Load the signed-in user; on 401 go to the sign-in page. */
async function loadAccount() {
  try {
    account = await get("/api/v1/whoami");
  } catch (error) {
    account = null;
    if (error.status !== 401) toast(error.message, "bad");
    return error.status !== 401;
  } finally {
    drawTop();
  }
  return true;
}

function signOut() {
  setKey("");
  forgetAll();
  account = null;
  drawTop();
  navigate("/console/signin");
}

function toSignIn() {
  if (match(location.pathname)?.page.module === "signin") return;
  account = null;
  drawTop();
  const next = location.pathname + location.search;
  navigate(`/console/signin${next === "/" ? "" : `?next=${encodeURIComponent(next)}`}`, { replaceEntry: true });
}

// ── theme ───────────────────────────────────────────────────────────────────────────────────────────

const theme = () => document.documentElement.dataset.theme || "system";

function themeButton() {
  const node = button(
    "",
    () => {
      const chosen = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
      if (chosen === "system") {
        delete document.documentElement.dataset.theme;
        localStorage.removeItem("lorimer.theme");
      } else {
        document.documentElement.dataset.theme = chosen;
        localStorage.setItem("lorimer.theme", chosen);
      }
      label();
      window.dispatchEvent(new Event("lorimer:theme"));
    },
    { class: "quiet small theme" },
  );
  const label = () => {
    node.textContent = { system: "Auto", light: "Light", dark: "Dark" }[theme()];
    node.setAttribute("aria-label", `Theme: ${theme()}`);
    node.title = "Theme: as the system has it, light or dark";
  };
  label();
  return node;
}

// ── events of the browser ───────────────────────────────────────────────────────────────────────────

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (
    !link ||
    event.defaultPrevented ||
    event.button ||
    event.metaKey ||
    event.ctrlKey ||
    event.shiftKey ||
    event.altKey
  )
    return;
  const to = new URL(link.getAttribute("href"), location.href); // links of SVG have no parts of their own
  if (link.hasAttribute("download") || link.hasAttribute("target") || to.origin !== location.origin) return;
  if (to.pathname !== "/" && !/^\/console(\/(?!static\/)|$)/.test(to.pathname)) return;
  if (to.hash && to.pathname === location.pathname) {
    event.preventDefault();
    const target = document.getElementById(to.hash.slice(1));
    target?.setAttribute("tabindex", "-1");
    target?.focus();
    return;
  }
  event.preventDefault();
  navigate(to.pathname + to.search);
});

let isGoing = false;
document.addEventListener("keydown", (event) => {
  if (
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    event.target.closest?.("input, textarea, select, dialog, [contenteditable]")
  )
    return;
  const target = isGoing && NAVIGATION.find(([, , letter]) => letter === event.key);
  if (event.key === "g") {
    isGoing = true;
    setTimeout(() => (isGoing = false), 1500);
    return;
  }
  isGoing = false;
  if (target) navigate(target[0] ? `/console/${target[0]}` : "/");
  const search = event.key === "/" && main.querySelector("[data-search]");
  if (search) {
    event.preventDefault();
    search.focus();
  }
});

window.addEventListener("popstate", show);
window.addEventListener("lorimer:signin", toSignIn);
/** Dispatched by the sign-in page when a key was accepted, with the URL to go to. */
window.addEventListener("lorimer:signedin", async (event) => {
  if (await loadAccount()) navigate(within(event.detail), { replaceEntry: true });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  window.dispatchEvent(new Event("lorimer:theme")),
);

/** Return the URL if it is in the console, else its first page: `next` in a link could name another server. */
function within(address) {
  return /^\/(console(\/|\?|$)|$|\?)/.test(address || "") ? address : "/";
}

drawNavigation();
drawTop();
const isOnSignIn = match(location.pathname)?.page.module === "signin";
if ((await loadAccount()) || isOnSignIn) show();
