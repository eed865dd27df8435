package testkit

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// reporter is a test, a benchmark or a property's *rapid.T.
type reporter interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// The last arguments of the functions below describe the checked value, as in Gomega: a
// format and its arguments, or nothing if the line is clear.

// Equal reports an error if got != want.
func Equal[V comparable](t reporter, got, want V, what ...any) {
	if got != want {
		t.Helper()
		t.Errorf("%s", differ(got, want, what))
	}
}

// MustEqual is Equal that ends the test.
func MustEqual[V comparable](t reporter, got, want V, what ...any) {
	if got != want {
		t.Helper()
		t.Fatalf("%s", differ(got, want, what))
	}
}

// EqualSlices is Equal for slices; nil equals empty.
func EqualSlices[S ~[]V, V comparable](t reporter, got, want S, what ...any) {
	if !slices.Equal(got, want) {
		t.Helper()
		t.Errorf("%s", differ(got, want, what))
	}
}

// NoError reports err if it is not nil. Must ends the test.
func NoError(t reporter, err error, what ...any) {
	if err != nil {
		t.Helper()
		t.Errorf("%s%v", describe(what), err)
	}
}

// ErrorIs reports an error if errors.Is(err, want) is false.
func ErrorIs(t reporter, err, want error, what ...any) {
	if !errors.Is(err, want) {
		t.Helper()
		t.Errorf("%s", differ(err, want, what))
	}
}

// ErrorHas reports an error if err is nil or its text does not contain want.
func ErrorHas(t reporter, err error, want string, what ...any) {
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Helper()
		t.Errorf("%serror %v, want one with %q", describe(what), err, want)
	}
}

// Result holds a function's value and error.
//
//	text := testkit.Result(os.ReadFile(path)).Must(t)
func Result[V any](value V, err error) result[V] { return result[V]{value, err} }

type result[V any] struct {
	value V
	err   error
}

// Must returns the value; an error ends the test.
func (r result[V]) Must(t interface {
	Helper()
	Fatal(args ...any)
}) V {
	if r.err != nil {
		t.Helper()
		t.Fatal(r.err)
	}
	return r.value
}

// Equal reports an error, or a value other than want. Requires: the values are
// comparable.
func (r result[V]) Equal(t reporter, want V, what ...any) {
	if r.err != nil || any(r.value) != any(want) {
		t.Helper()
		t.Errorf("%s, %v", differ(r.value, want, what), r.err)
	}
}

// MustEqual is Equal that ends the test.
func (r result[V]) MustEqual(t reporter, want V, what ...any) {
	if r.err != nil || any(r.value) != any(want) {
		t.Helper()
		t.Fatalf("%s, %v", differ(r.value, want, what), r.err)
	}
}

func differ(got, want any, what []any) string {
	verb := "%+v"
	if reflect.ValueOf(got).Kind() == reflect.String {
		verb = "%q"
	}
	return fmt.Sprintf("%sgot "+verb+", want "+verb, describe(what), got, want)
}

func describe(what []any) string {
	if len(what) == 0 {
		return ""
	}
	return fmt.Sprintf(what[0].(string), what[1:]...) + ": "
}
