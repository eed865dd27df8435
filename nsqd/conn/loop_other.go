//go:build !linux

package conn

import "errors"

// loop is Linux's alone: elsewhere there is none.
type loop struct{}

func newLoop(*env) (*loop, error) { return nil, errors.New("event loops need Linux") }

func (*loop) take(int, string) {}
func (*loop) stop()            {}
func (*loop) run()             {}
