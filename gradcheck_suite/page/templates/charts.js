// Draws every plot as SVG at the width of its place. Colours are CSS variables, so a change of theme redraws nothing.
"use strict";
(function () {
  const { config, specs } = JSON.parse(document.getElementById("plots").textContent);
  const NARROW = 420; // pixels of a plot on a phone
  const BESIDE = 560; // pixels of a plot that has room for two legends beside each other

  // legends in columns that fit, and names beside the plot that leave room for it
  function narrowed(part, width) {
    if (part === null || typeof part !== "object") return;
    if (part.legend) {
      const names = (part.scale || {}).domain || [];
      part.legend.columns = names.some((name) => String(name).length > 18) ? 1 : 2;
    }
    if (part.axis && part.axis.labelLimit) part.axis.labelLimit = Math.min(part.axis.labelLimit, 0.52 * width);
    for (const key of Object.keys(part)) if (key !== "data") narrowed(part[key], width);
  }

  // numbers with three digits; nothing of a record is read as HTML
  function told(value) {
    const exact = typeof value !== "number" || Number.isInteger(value);
    const text = exact ? value.toLocaleString("en") : String(Number(value.toPrecision(3)));
    return text.replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt(0)};`);
  }

  function sized(spec, width) {
    const copy = JSON.parse(JSON.stringify(spec));
    if (width < NARROW) narrowed(copy, width);
    const { width: most = width, least = 0 } = copy.usermeta || {};
    width = Math.max(Math.min(width, most), least);
    if (!copy.hconcat) {
      copy.width = width;
      copy.autosize = { type: "fit-x", contains: "padding" };
      return copy;
    }
    const beside = width >= 420 ? copy.hconcat.length : 1;
    const part = Math.floor((width - (beside - 1) * (copy.spacing || 0)) / beside) - 55; // beside the axis
    for (const panel of copy.hconcat) panel.width = part;
    if (beside === 1) {
      copy.vconcat = copy.hconcat;
      delete copy.hconcat;
    }
    return copy;
  }

  // the names of a legend have the width of their plot
  function fitted(width) {
    const layout = width < BESIDE ? { layout: { top: { direction: "vertical", anchor: "start" } } } : {};
    return { ...config, legend: { ...config.legend, ...layout, labelLimit: width - 40 } };
  }

  // at the width that its place has: one drawing at a time, and again where the place has changed meanwhile
  function draw(place) {
    place.drawing = (place.drawing || Promise.resolve()).then(async () => {
      const width = Math.floor(place.clientWidth);
      if (width && width !== place.drawnAt) await drawn(place, width);
    });
    return place.drawing;
  }

  async function drawn(place, width) {
    place.drawnAt = width;
    place.classList.toggle("wide", ((specs[place.dataset.chart].usermeta || {}).least || 0) > width);
    const options = { actions: false, renderer: "svg", ast: true, config: fitted(width), tooltip: { theme: "custom", sanitize: told }, defaultStyle: false };
    const { view } = await vegaEmbed(place, sized(specs[place.dataset.chart], width), options);
    if (place.view) place.view.finalize();
    place.view = view;
    // the element around it says what the plot shows, and its parts are presentation
    place.removeAttribute("role");
    place.removeAttribute("aria-roledescription");
    place.querySelector("svg").setAttribute("aria-hidden", "true");
    place.querySelector("svg").setAttribute("focusable", "false");
  }

  const places = [...document.querySelectorAll(".chart")];
  async function drawAll(which) {
    for (const place of which) await draw(place);
  }
  window.drawPlots = (within) => drawAll(places.filter((place) => within.contains(place)));
  window.drawnPlots = drawAll(places);
  let waiting;
  const seen = new ResizeObserver(() => {
    clearTimeout(waiting);
    waiting = setTimeout(() => drawAll(places), 150);
  });
  for (const place of places) seen.observe(place);
})();
