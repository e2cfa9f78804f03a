"use strict";
// A page of annotated source: the line or symbol that the address names comes into the middle of the screen,
// out of its fold if it is in one; what is folded is printed. Without JavaScript the stylesheet and the
// browser do the same.

(() => {
  const MIDDLE = 0.48;
  let isBack = ["reload", "back_forward"].includes(performance.getEntriesByType("navigation")[0]?.type);

  function show() {
    const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!named) return;
    for (let fold = named.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    // Who comes back finds the page as it was left.
    if (isBack) return;
    const target = named.closest(".mm-line") ?? named;
    scrollBy({ top: target.getBoundingClientRect().top - MIDDLE * innerHeight, behavior: "instant" });
  }

  show();
  addEventListener("load", show);
  addEventListener("hashchange", show);
  globalThis.navigation?.addEventListener("navigate", (event) => { isBack = event.navigationType === "traverse"; });
  addEventListener("click", (event) => {
    // The address stays the same, and no event tells of it.
    const link = event.target.closest("a[href]");
    if (link?.hash && link.href === location.href) setTimeout(show);
  });
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll(".mm-imports")) fold.open = true;
  });
})();
