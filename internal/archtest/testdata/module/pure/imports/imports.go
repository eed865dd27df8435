// Package imports reaches for what is not pure.
package imports

import (
	"os"
	"sync"

	"fixture.test/m/impure"
	"fixture.test/m/pure/good"
)

// Err is another package's sentinel and a lock.
func Err(*sync.Mutex) error { return os.Chdir(impure.Path) }

// Full is fine.
func Full() error { return good.ErrFull }
