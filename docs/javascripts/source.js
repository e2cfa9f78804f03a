"use strict";
// A page of annotated source: the line or symbol that the address names comes into the middle of the screen,
// out of its fold if it is in one; what is folded is printed. Without JavaScript the stylesheet and the
// browser do the same.

(() => {
  const MIDDLE = 0.48;
  const root = document.documentElement;
  let isBack = ["reload", "back_forward"].includes(performance.getEntriesByType("navigation")[0]?.type);

  function show() {
    const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!named) return;
    for (let fold = named.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    // Who comes back finds the page as it was left.
    if (isBack) return;
    const target = named.closest(".mm-line") ?? named;
    // Prose stays in view beside long code: what counts is where it stands by itself.
    const prose = target.closest(".mm-prose");
    prose?.style.setProperty("position", "static");
    const { top } = target.getBoundingClientRect();
    prose?.style.removeProperty("position");
    scrollBy({ top: top - MIDDLE * innerHeight, behavior: "instant" });
  }

  // The browser scrolls by itself, just before: to about the same place, so that nothing jumps. But for
  // keys and paging the whole screen counts, so the padding goes again.
  const prepare = () => root.style.setProperty("scroll-padding-top", `${100 * MIDDLE}vh`);
  const settle = () => {
    show();
    setTimeout(() => root.style.removeProperty("scroll-padding-top"));
  };

  prepare();
  show();
  addEventListener("load", settle);
  addEventListener("hashchange", settle);
  globalThis.navigation?.addEventListener("navigate", (event) => { isBack = event.navigationType === "traverse"; });
  addEventListener("click", (event) => {
    const link = event.target.closest("a[href]");
    if (!link?.hash || link.pathname !== location.pathname) return;
    prepare();
    // Where the address stays the same, no event tells of it.
    if (link.href === location.href) setTimeout(settle);
  });
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll(".mm-imports")) fold.open = true;
  });
})();
