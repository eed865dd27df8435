// Package console drives the web console of a real cluster in a headless Chromium. Each page loads
// without an error, draws, is usable with a keyboard, a screen reader and a telephone, and carries out
// its actions. The package contains only tests; package console of the product tests everything that
// needs no browser.
package console
