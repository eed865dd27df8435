//go:build !linux

package conn

import (
	"context"
	"errors"
)

// loops exist on Linux only.
type loops struct{}

func newLoops(context.Context, *env, int, int) (*loops, error) {
	return nil, errors.New("event loops need Linux")
}

func (*loops) serve(int, string, Protocol) {}
func (*loops) stop()                       {}
func (*loops) stats() []LoopStats          { return nil }
