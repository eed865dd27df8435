// Applies the theme that the reader has chosen, before the first paint.
"use strict";
try {
  const theme = localStorage.getItem("srtm-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* no storage: the theme of the system */ }
