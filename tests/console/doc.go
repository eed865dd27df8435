// Package console drives the web console of a real cluster in a headless Chromium: that
// each page loads without an error, draws, is of use to a keyboard, a screen reader and a
// telephone, and does what it is told. It is all tests; what needs no browser is tested
// in package console of the product.
package console
