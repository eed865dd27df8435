// Package pages runs the commands of pages in docs/ as printed. tests/clients runs the tutorial,
// tests/security the page on security.
package pages
