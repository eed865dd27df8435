package tokenbucket_test

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// either is the common interface of Bucket and Hindsight.
type either interface {
	Eligible(mono.Time) mono.Time
	Tokens(mono.Time) tokenbucket.Tokens
	Retune(mono.Time, tokenbucket.Share, tokenbucket.Tokens) tokenbucket.Tokens
	Share() tokenbucket.Share
}

// Scenarios of testdata. Shares are in milli-msg/s and messages, tokens in thousandths. A time is a duration since 0, or
// "never-3ns" or "first" for the clock's ends. "take" prints when the message is eligible. A take of a Hindsight also
// has the time of the question. A command may be repeated: "3x take 0s".
func TestScenarios(t *testing.T) {
	testkit.Scenarios(t, "*.txt", func(t *testing.T) func([]string) (string, error) {
		var b either
		return func(words []string) (string, error) {
			times := 1
			if n, repeated := strings.CutSuffix(words[0], "x"); repeated {
				times, _ = strconv.Atoi(n)
				words = words[1:]
			}
			var answers []string
			for range times {
				answers = append(answers, command(t, &b, words))
			}
			if text := strings.Join(answers, " "); strings.TrimSpace(text) != "" {
				return text + "\n", nil
			}
			return "", nil
		}
	})
}

func command(t *testing.T, b *either, words []string) string {
	number := func(i int) int64 {
		n, err := strconv.ParseInt(words[i], 10, 64)
		if err != nil {
			t.Fatalf("%q: %v", words, err)
		}
		return n
	}
	share := func(i int) (s tokenbucket.Share) {
		if _, err := fmt.Sscanf(words[i], "%d/%d", &s.Rate, &s.Burst); err != nil {
			t.Fatalf("%q: %v", words, err)
		}
		return s
	}
	at := func(i int) mono.Time {
		text, from := words[i], mono.Time(0)
		if rest, is := strings.CutPrefix(text, "never"); is {
			text, from = cmp.Or(rest, "0s"), mono.Never
		} else if text == "first" {
			return math.MinInt64
		}
		d, err := time.ParseDuration(text)
		if err != nil {
			t.Fatalf("%q: %v", words, err)
		}
		return from + mono.Time(d)
	}
	say := func(e mono.Time) string {
		switch {
		case e == mono.Never:
			return "never"
		case e > mono.Never-1000:
			return fmt.Sprint("never", time.Duration(e-mono.Never))
		case e == math.MinInt64:
			return "first"
		}
		return time.Duration(e).String()
	}
	switch words[0] {
	case "full":
		made := tokenbucket.NewFull(share(1), at(2))
		*b = &made
	case "new":
		made := tokenbucket.New(share(1), at(2))
		*b = &made
	case "bucket":
		*b = new(tokenbucket.Bucket)
	case "hindsight":
		*b = new(tokenbucket.Hindsight)
	case "take":
		if h, is := (*b).(*tokenbucket.Hindsight); is {
			e, ok := h.Take(at(1), at(2))
			return say(e) + map[bool]string{false: " not yet"}[ok]
		}
		return say((*b).(*tokenbucket.Bucket).Take(at(1)))
	case "eligible":
		return say((*b).Eligible(at(1)))
	case "tokens":
		return fmt.Sprint(int64((*b).Tokens(at(1))))
	case "share":
		return fmt.Sprintf("%d/%d", (*b).Share().Rate, (*b).Share().Burst)
	case "retune":
		return fmt.Sprintf("released %d", (*b).Retune(at(1), share(2), tokenbucket.Tokens(number(3))))
	case "admit":
		ok, retry := (*b).(*tokenbucket.Bucket).Admit(number(1), at(2))
		return fmt.Sprint(ok, ", retry after ", say(mono.Time(retry)))
	case "after":
		return say((*b).(*tokenbucket.Hindsight).After(number(1), at(2)))
	case "used":
		n, short := (*b).(*tokenbucket.Hindsight).Used()
		return fmt.Sprintf("%d, short %v", n, short)
	default:
		t.Fatalf("no command %q", words)
	}
	return ""
}
