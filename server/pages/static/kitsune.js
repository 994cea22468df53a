// Progressive enhancement; every page works without this script. It updates ages and the time of the last update, adds
// buttons that copy code, and protects typed text from automatic reloads.
"use strict";

(() => {
  const UNITS = [[90, 1, "s"], [60 * 60, 60, "min"], [48 * 3600, 3600, "h"], [60 * 86400, 86400, "days"]];

  // Uses the clock of the server, so that ages are right even if the clock of this machine is wrong.
  const told = document.querySelector("meta[name=kitsune-now]");
  const ahead = told ? Date.parse(told.content) - Date.now() : 0;
  const now = () => Date.now() + ahead;

  // Like `ago` in server/charts/drawing/words.py; null where that returns a date.
  function ago(seconds) {
    if (seconds < 1) return "just now";
    const unit = UNITS.find(([most]) => seconds < most);
    return unit ? `${Math.trunc(seconds / unit[1])}\u00a0${unit[2]} ago` : null;
  }

  function countAges() {
    for (const element of document.querySelectorAll("time[data-ago]")) {
      const text = ago((now() - Date.parse(element.dateTime)) / 1000);
      if (text && text !== element.textContent) element.textContent = text;
    }
  }

  // An answer without changes also counts as an update; without any answer, the shown age grows.
  function noteAnswer(event) {
    if (!event.detail.successful) return;
    for (const element of document.querySelectorAll("time[data-updated]")) {
      element.dateTime = new Date(now()).toISOString();
      element.removeAttribute("title");
    }
    countAges();
  }

  // Disables a button while too few or too many checkboxes of its form are ticked.
  function countChoices() {
    for (const button of document.querySelectorAll("button[data-least]")) {
      const chosen = [...button.form.elements].filter((one) => one.type === "checkbox" && one.checked);
      button.disabled = chosen.length < Number(button.dataset.least) || chosen.length > Number(button.dataset.most);
    }
  }

  // Uses a permanent live region: few screen readers announce a region that is inserted together with its text.
  function announce(text) {
    const region = document.getElementById("announced");
    if (region.textContent !== text) region.textContent = text;
  }

  function announceNews() {
    const told = document.querySelector("[data-announced]");
    if (told) announce(told.textContent);
  }

  function isTyped(field) {
    if (field.type === "hidden" || field.type === "submit") return false;
    if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
    return "defaultValue" in field && field.value !== field.defaultValue;
  }

  // If something is typed, shows a notice instead of reloading the page.
  function keepTyped(event) {
    if (!event.detail.xhr.getResponseHeader("hx-refresh")) return;
    const notice = document.getElementById("outdated");
    const fields = [...document.forms].flatMap((form) => [...form.elements]);
    if (!notice || !fields.some(isTyped)) return;
    event.preventDefault();
    notice.hidden = false;
    announce(notice.textContent);
  }

  // Browsers offer the clipboard only with https or on localhost; otherwise the selection is copied.
  async function copy(code) {
    if (navigator.clipboard) return navigator.clipboard.writeText(code.textContent);
    getSelection().selectAllChildren(code);
    const isDone = document.execCommand("copy");
    getSelection().removeAllRanges();
    if (!isDone) throw new Error("the browser refuses");
  }

  function offerCopies() {
    for (const code of document.querySelectorAll("pre > code")) {
      const box = code.parentElement;
      if (box.parentElement.classList.contains("copied")) continue;
      const around = document.createElement("div");
      around.className = "copied";
      box.replaceWith(around);
      const button = document.createElement("button");
      button.type = "button";
      button.className = "second copy";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        button.textContent = await copy(code).then(() => "Copied", () => "Select it instead");
        announce(button.textContent);
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      });
      around.append(box, button);
    }
  }

  for (const element of document.querySelectorAll("[data-scripted]")) element.hidden = false;
  offerCopies();
  document.addEventListener("htmx:afterSettle", offerCopies);
  document.addEventListener("htmx:afterSettle", announceNews);
  document.addEventListener("htmx:beforeOnLoad", keepTyped);
  countAges();
  countChoices();
  document.addEventListener("change", countChoices);
  document.addEventListener("htmx:afterSettle", countChoices);
  window.addEventListener("pageshow", countChoices);
  setInterval(countAges, 1000);
  document.addEventListener("htmx:afterRequest", noteAnswer);
})();
