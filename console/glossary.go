package console

import (
	"context"
	"net/url"
)

// glossary explains the words of the pages. The text is in its template.
func glossary(context.Context, url.Values, user) (view, error) {
	return view{Template: "glossary", Title: "Glossary"}, nil
}
