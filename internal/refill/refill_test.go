package refill_test

import (
	"math/big"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/refill"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestParse(t *testing.T) {
	for _, test := range []struct {
		text           string
		milli, seconds int64
		again          string
	}{
		{"0", 0, 1, "0"}, {"1", 1000, 1, "1"}, {"2.5", 2500, 1, "2.5"}, {".5", 500, 1, "0.5"}, {"1.", 1000, 1, "1"}, {"0.001", 1, 1, "0.001"},
		{"0.0015", 15, 10, "0.0015"}, {"0.001157", 1157, 1000, "0.001157"}, {"0.000278", 278, 1000, "0.000278"}, {"0.10000", 100, 1, "0.1"},
		{"100/day", 100_000, 86_400, "100/day"}, {"1/hour", 1000, 3600, "1/hour"}, {"1/h", 1000, 3600, "1/hour"}, {"0.5/minute", 500, 60, "0.5/minute"},
		{"7/week", 7000, 604_800, "7/week"}, {"5/10s", 5000, 10, "0.5"}, {"5/36h", 5000, 129_600, "5/129600s"}, {"3/second", 3000, 1, "3"},
		{"0.0005/day", 5, 864_000, "0.005/864000s"}, {"0/day", 0, 1, "0"}, {"1000000000", 1e12, 1, "1000000000"},
	} {
		r, err := refill.Parse(test.text)
		if want := (refill.Refill{Milli: test.milli, Seconds: test.seconds}); err != nil || r != want {
			t.Errorf("%q: %+v, %v; want %+v", test.text, r, err, want)
			continue
		}
		testkit.Equal(t, r.String(), test.again, "%q", test.text)
	}
	for _, text := range []string{"", ".", "-1", "+1", "1e3", "NaN", "Inf", "one", "1/", "1/month", "1/0s", "1/-1h", "1/1.5s", "1/367h1ms", "1/8785h", "1//day", "1/day/2", " 1", "1_000", "0.00000000001", "9999999999999999999"} {
		if r, err := refill.Parse(text); err == nil {
			t.Errorf("%q was read as %+v", text, r)
		}
	}
}

// Bucket returns the refill exactly, as a fraction.
func TestBucketIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := refill.Refill{Milli: rapid.Int64Range(1, int64(tokenbucket.MaxRate)).Draw(t, "milli"), Seconds: rapid.SampledFrom([]int64{1, 10, 60, 1000, 3600, 86_400, 604_800, 31_536_000, 65_537}).Draw(t, "seconds")}
		capacity := rapid.Int64Range(1, 1e6).Draw(t, "capacity")
		share, scale, err := r.Bucket(capacity)
		if err != nil {
			if !strings.Contains(err.Error(), "its step is 0.00") {
				t.Fatal(err)
			}
			return
		}
		if err := share.Validate(); err != nil || share.Burst != capacity*scale || scale > refill.MaxScale {
			t.Fatalf("%+v, scale %d: %v", share, scale, err)
		}
		if big.NewRat(r.Milli, r.Seconds).Cmp(big.NewRat(int64(share.Rate), scale)) != 0 {
			t.Fatalf("%s is kept as %+v, scale %d", r, share, scale)
		}
		again, err := refill.Parse(r.String())
		if err != nil || big.NewRat(r.Milli, r.Seconds).Cmp(big.NewRat(again.Milli, again.Seconds)) != 0 {
			t.Fatalf("%+v is written as %s, which is read as %+v, %v", r, r, again, err)
		}
	})
}

func TestStepIsNamed(t *testing.T) {
	for _, test := range []struct {
		text     string
		capacity int64
		step     string
	}{{"0.0015", 1e9, "0.001 "}, {"0.001157", 2e6, "0.00001 "}, {"1/65537s", 10, "0.0000001 "}} {
		_, _, err := testkit.Result(refill.Parse(test.text)).Must(t).Bucket(test.capacity)
		if err == nil || !strings.Contains(err.Error(), "step is "+test.step) {
			t.Errorf("%s with a capacity of %d: %v, want a step of %s", test.text, test.capacity, err, test.step)
		}
	}
}
