package nsqhttp

import (
	"fmt"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestLinesAreTheBodysOwn(t *testing.T) {
	for _, c := range []struct {
		body string
		want string // the messages, or the error
	}{
		{"a\nbc\n", "2 [a bc]"},
		{"a", "1 [a]"},
		{"\n\na\n\nb\n\n", "2 [a b]"},
		{"a\r\nb", "2 [a\r b]"},
		{"", "0 []"},
		{"\n\n", "0 []"},
		{"a\n\nlong\n", "MSG_TOO_BIG: message 2 of 4 bytes is longer than 3"},
	} {
		l, err := splitLines([]byte(c.body), 3)
		var got string
		if err != nil {
			got = err.Error()
		} else {
			var all []string
			l.Each(func(body []byte) { all = append(all, string(body)) })
			got = fmt.Sprint(l.Len(), " ", all)
		}
		testkit.Equal(t, got, c.want, "%q", c.body)
	}
}

// A line may be one byte long. A list of such lines would take many times the memory of the body.
func TestLinesCostNothing(t *testing.T) {
	body := []byte(strings.Repeat("x\n", 10_000))
	n := 0
	count := func([]byte) { n++ }
	testkit.Equal(t, testing.AllocsPerRun(10, func() {
		l := testkit.Result(splitLines(body, 1)).Must(t)
		l.Each(count)
	}), 0, "allocations")
	if n%10_000 != 0 || n == 0 {
		t.Errorf("%d lines", n)
	}
}
