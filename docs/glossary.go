// Package docs embeds the pages that a program shows: the glossary is also a page of the console. The
// package must not know its users. Read console/glossary.go next.
package docs

import _ "embed"

// Glossary is glossary.md. Each word has a heading of the third level.
//
//go:embed glossary.md
var Glossary string
