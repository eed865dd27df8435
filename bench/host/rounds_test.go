package host

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// subject measures 10 times its number plus the round, and records the order of calls.
func subject(number int, order *[]int) Subject[float64] {
	return Subject[float64]{Name: fmt.Sprint("s", number), Measure: func(round int) (float64, error) {
		*order = append(*order, number)
		return float64(10*number + round), nil
	}}
}

func TestEachRoundBeginsWithAnotherSubject(t *testing.T) {
	var order []int
	got := testkit.Result(Rounds(t.Context(), 3, []Subject[float64]{subject(0, &order), subject(1, &order), subject(2, &order)})).Must(t)
	testkit.Equal(t, fmt.Sprint(order), "[0 1 2 1 2 0 2 0 1]", "order")
	testkit.Equal(t, fmt.Sprint(got), "map[s0:[0 1 2] s1:[10 11 12] s2:[20 21 22]]", "results")
}

func TestARoundThatFailsNamesItsSubject(t *testing.T) {
	broken := Subject[float64]{Name: "broken", Measure: func(round int) (float64, error) {
		if round == 1 {
			return 0, errors.New("no answer")
		}
		return 1, nil
	}}
	_, err := Rounds(t.Context(), 3, []Subject[float64]{broken})
	testkit.ErrorHas(t, err, "round 2, broken: no answer", "a failed round")
}

func TestOnlyAbsentSubjectsAreLeftOut(t *testing.T) {
	all := []Subject[float64]{{Name: "ours"}, {Name: "nginx", Err: fmt.Errorf("nginx: %w", ErrAbsent)}}
	var out bytes.Buffer
	there := testkit.Result(Present(&out, all)).Must(t)
	if len(there) != 1 || there[0].Name != "ours" || out.String() != "nginx: skipped: nginx: not installed\n" {
		t.Errorf("%+v; printed %q", there, &out)
	}
	_, err := Present(&out, append(all, Subject[float64]{Name: "theirs", Err: errors.New("port in use")}))
	testkit.ErrorHas(t, err, "theirs: port in use", "a subject that did not start")
}

func TestTablesAndTargets(t *testing.T) {
	figure := func(v float64) float64 { return v }
	table := Table[float64]{
		Figure("median", "%.1f", figure),
		{Title: "least", Format: "%.0f", Value: func(v float64) (float64, bool) { return v, v > 0 }, Sum: Least},
		{Title: "rounds", Text: func(rounds []float64) string { return fmt.Sprint(len(rounds)) }},
	}
	results := map[string][]float64{"a": {3, 1, 2}, "b": {4, 4}, "c": {0}}
	var out bytes.Buffer
	table.Write(&out, []Subject[float64]{{Name: "a"}, {Name: "c"}, {Name: "not measured"}}, results)
	Judge(&out, "ratio", results, []Target[float64]{
		Ratio("a to b", "a", "b", figure, 0.5), Ratio("b to a", "b", "a", figure, 1.5), Ratio("a to none", "a", "none", figure, 1),
	})
	want := []string{
		"|  | median | least | rounds |", "| --- | --- | --- | --- |", "| a | 2.0 | 1 | 3 |", "| c | 0.0 | - | 1 |", "",
		"| ratio | is | target | kept |", "| --- | --- | --- | --- |", "| a to b | 0.50 | <= 0.5 | yes |", "| b to a | 2.00 | <= 1.5 | no |", "",
	}
	testkit.Equal(t, out.String(), strings.Join(want, "\n"), "tables")
}
