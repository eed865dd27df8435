package faults

import (
	"strings"
	"testing"
)

func TestNearest(t *testing.T) {
	known := []string{"tcp-address", "http-address", "https-address", "id", "rate"}
	for word, want := range map[string]string{
		"tcp-adress": "tcp-address", "htpp-address": "http-address", "http-addres": "http-address", "di": "id", "rtae": "rate",
		"colour": "", "": "", strings.Repeat("x", 1<<20): "",
	} {
		if got := Nearest(word, known); got != want {
			t.Errorf("%.20q: %q, want %q", word, got, want)
		}
	}
	if got := Hint("--", "rat", known); got != "; did you mean --rate?" {
		t.Error(got)
	}
	if got := Hint("--", "colour", known); got != "" {
		t.Error(got)
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"abc", "abc", 0}, {"abc", "", 3}, {"", "abc", 3}, {"abc", "acb", 1}, {"kitten", "sitting", 3}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("%q, %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
