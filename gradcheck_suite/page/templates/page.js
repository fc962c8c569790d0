// Pages inside the one file: the hash names one, and after a slash a place on it. Themes; buttons that copy.
"use strict";
(function () {
  const root = document.documentElement;
  const tabs = [...document.querySelectorAll("[role=tab]")];

  // a place may be named without its page: #C1.4 is #claims/C1.4
  function full(hash) {
    if (!hash || tabs.some((tab) => tab.getAttribute("aria-controls") === hash.split("/")[0])) return hash;
    const place = document.getElementById(hash) || document.querySelector(`[id$="/${CSS.escape(hash)}"]`);
    const panel = place && place.closest(".panel");
    return panel ? (place.id.startsWith(`${panel.id}/`) ? place.id : `${panel.id}/${place.id}`) : hash;
  }

  function show() {
    const hash = full(decodeURIComponent(location.hash.slice(1)));
    const name = hash.split("/")[0];
    const current = tabs.find((tab) => tab.getAttribute("aria-controls") === name) || tabs[0];
    const back = history.state && history.state.top;
    for (const tab of tabs) {
      const chosen = tab === current;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).classList.toggle("current", chosen);
    }
    // Tab goes on from what was scrolled to: from the start of the page where nothing was asked for
    if (name) current.scrollIntoView({ block: "nearest", inline: "nearest" });
    const panel = document.getElementById(current.getAttribute("aria-controls"));
    const place = hash.includes("/") && (document.getElementById(hash) || document.getElementById(hash.split("/")[1]));
    const drawn = drawPlots(panel);
    if (back) {
      drawn.then(() => window.scrollTo(0, back));
      return;
    }
    drawn.then(() => place && place.scrollIntoView());
    if (place) place.focus({ preventScroll: true });
    else if (name) window.scrollTo(0, 0);
  }

  if (tabs.length) {
    root.classList.add("js");
    document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
      const at = tabs.indexOf(document.activeElement);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
      if (at < 0 || to === undefined) return;
      event.preventDefault();
      const tab = tabs[(to + tabs.length) % tabs.length];
      tab.focus();
      // following a link would take the focus away from the tab
      history.pushState(null, "", tab.getAttribute("href"));
      show();
    });
    // Back returns to where the reader was
    history.scrollRestoration = "manual";
    let waiting;
    window.addEventListener("scroll", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => history.replaceState({ top: window.scrollY }, ""), 100);
    });
    window.addEventListener("popstate", show); // links within the page fire it too
    show();
  }

  // on a narrow screen the claims follow the short answers; moved, not only drawn there, for the keyboard's order
  const claims = document.querySelector(".card.claims:has(li)");
  const narrow = matchMedia("(max-width: 60rem)");
  function placeClaims() {
    if (narrow.matches) document.querySelector("ul.brief").after(claims);
    else document.querySelector(".answers").append(claims);
  }
  if (claims) {
    narrow.addEventListener("change", placeClaims);
    placeClaims();
  }

  const theme = document.getElementById("theme");
  const names = ["as the system has them", "light", "dark"];
  let chosen = 0;
  theme.addEventListener("click", () => {
    chosen = (chosen + 1) % names.length;
    if (chosen) root.dataset.theme = names[chosen];
    else delete root.dataset.theme;
    theme.setAttribute("aria-label", `Colours: ${names[chosen]}`);
    theme.title = `Colours: ${names[chosen]}`;
  });

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("pre").textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
        button.textContent = "Selected: copy it";
      }
    });
  }
})();
