// Draws every plot as SVG at the width of its place. Colours are CSS variables, so a change of theme redraws nothing.
"use strict";
(function () {
  const { config, specs } = JSON.parse(document.getElementById("plots").textContent);
  const HIDDEN = 640; // pixels of a plot on a page that is not shown, for paper

  function sized(spec, width) {
    const copy = JSON.parse(JSON.stringify(spec));
    width = Math.min(width, (copy.usermeta || {}).width || width);
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
    return { ...config, legend: { ...config.legend, labelLimit: width - 40 } };
  }

  async function draw(place) {
    const width = Math.floor(place.clientWidth) || HIDDEN;
    if (place.drawnAt === width) return;
    place.drawnAt = width;
    const options = { actions: false, renderer: "svg", ast: true, config: fitted(width), tooltip: { theme: "custom" }, defaultStyle: false };
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
  window.drawnPlots = drawAll(places.filter((place) => place.clientWidth)).then(() => drawAll(places));
  let waiting;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => drawAll(places.filter((place) => place.clientWidth)), 150);
  });
})();
