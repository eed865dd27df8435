package console

import (
	"maps"
	"net/url"
	"slices"
	"strconv"
)

// perPage is the number of rows of a list on a page.
const perPage = 50

// pager is the shown range of a list, with links to the rest; "": no link.
type pager struct {
	From, To, Total int // From counts from 1
	Back, Forward   string
}

// paged returns the shown part of a list, from the index that the query has under key.
func paged[T any](all []T, path string, q url.Values, key string) ([]T, pager) {
	from, _ := strconv.Atoi(q.Get(key)) // else from the first
	from = min(max(0, from), len(all))
	p := pager{From: min(from+1, len(all)), To: min(from+perPage, len(all)), Total: len(all)}
	link := func(from int) string {
		to := maps.Clone(q)
		to.Set(key, strconv.Itoa(from))
		return path + "?" + to.Encode()
	}
	if from > 0 {
		p.Back = link(max(0, from-perPage))
	}
	if p.To < len(all) {
		p.Forward = link(p.To)
	}
	return all[from:p.To], p
}

// order is the sort order of a list that comes in pages. The query has it as sort and
// desc. Scripts sort tables that come whole.
type order struct {
	path string
	q    url.Values
	key  string
	desc bool
}

// orderOf reads the order from a query. usual is the key of a query without sort.
func orderOf(path string, q url.Values, usual string) order {
	o := order{path, q, q.Get("sort"), q.Get("desc") != ""}
	if o.key == "" {
		o.key = usual
	}
	return o
}

// head is the head of a column that sorts.
type head struct {
	Text, Link string // Link "": a script sorts
	Order      string // value of aria-sort
	Number     bool
}

// Head returns the head of a column. Choosing a column again reverses the order. The first choice
// of a column of numbers begins with the largest.
func (o order) Head(key, text string, number bool) head {
	h, q, desc := head{Text: text, Number: number}, maps.Clone(o.q), number
	if o.key == key {
		h.Order, desc = "ascending", !o.desc
		if o.desc {
			h.Order = "descending"
		}
	}
	q.Del("from")
	q.Del("desc")
	if q.Set("sort", key); desc {
		q.Set("desc", "1")
	}
	h.Link = o.path + "?" + q.Encode()
	return h
}

// sorted sorts rows by the comparison of the order's key. An unknown key changes nothing.
func sorted[T any](rows []T, o order, comparisons map[string]func(a, b T) int) {
	if compare := comparisons[o.key]; compare != nil {
		slices.SortStableFunc(rows, func(a, b T) int {
			if o.desc {
				a, b = b, a
			}
			return compare(a, b)
		})
	}
}
