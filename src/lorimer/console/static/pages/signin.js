// Signs in with an API key, and out again. The key is validated before it is stored, in this browser only.

import { key, setKey, tryKey } from "../api.js";
import { forgetAll } from "../conversation_files.js";
import { button, commandBlock, h, pageHead, panel } from "../dom.js";

export const title = "Sign in";

export async function render(root, { query, account }) {
  const next = query.get("next") || "/";
  if (account && !account.needs_key) {
    root.append(
      pageHead("Sign in"),
      panel(
        null,
        h("p", null, "This server asks for no key: there is nothing to sign in to."),
        h("p", null, h("a", { href: "/" }, "Go to the overview")),
      ),
    );
    return;
  }
  root.append(pageHead("Sign in"), h("div", { class: "signin" }, account ? signedIn(account) : form(next), notes()));
}

function form(next) {
  const input = h("input", {
    type: "password",
    name: "key",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    autocapitalize: "off",
    placeholder: "tml-…",
    "aria-describedby": "signin-error",
    autofocus: true,
  });
  const problem = h("p", { id: "signin-error", class: "error-text", role: "alert" });
  const submit = h("button", { type: "submit", class: "primary" }, "Sign in");
  const shown = h("input", { type: "checkbox", onchange: () => (input.type = shown.checked ? "text" : "password") });
  const signIn = async (event) => {
    event.preventDefault();
    const candidate = input.value.trim();
    submit.disabled = true;
    problem.textContent = "";
    input.removeAttribute("aria-invalid");
    try {
      await tryKey(candidate);
      setKey(candidate);
      window.dispatchEvent(new CustomEvent("lorimer:signedin", { detail: next }));
    } catch (error) {
      problem.textContent = error.message;
      input.setAttribute("aria-invalid", "true");
      input.focus();
    } finally {
      submit.disabled = false;
    }
  };
  const node = panel(
    "Enter your API key",
    h(
      "form",
      { class: "stack-form", onsubmit: signIn },
      h("label", { class: "field" }, h("span", null, "API key"), input),
      h("label", { class: "check" }, shown, "Show the key"),
      problem,
      h("div", { class: "row" }, submit),
    ),
  );
  setTimeout(() => input.focus()); // after the heading, which gets the focus when a page opens
  return node;
}

function signedIn(account) {
  return panel(
    "You are signed in",
    h("p", null, `As ${account.name}, with the key ${key().slice(0, 8)}….`),
    h("div", { class: "row" }, h("a", { class: "button", href: "/" }, "Overview"), button("Sign out", signOut)),
  );
}

/** Reload the page, so that nothing loaded with the key stays in memory. */
function signOut() {
  setKey("");
  forgetAll();
  location.assign("/console/signin");
}

function notes() {
  return panel(
    "About the key",
    h(
      "p",
      null,
      "The key is kept in this browser (localStorage) until you sign out, and sent to this server only. The conversations of the playground are kept until you clear them or sign out; choices such as the theme and prompt sets stay.",
    ),
    h("p", null, "The operator creates keys on the server's machine:"),
    commandBlock("lorimer key create NAME"),
  );
}
