package broker

import (
	"testing"
	"unsafe"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestABodyGetsTheSmallestClassThatHoldsIt(t *testing.T) {
	for i, smaller := 0, 0; i < poolClasses; i++ {
		size := classSize(i)
		testkit.Equal(t, class(smaller+1), i, "class of the smallest body")
		testkit.Equal(t, class(size), i, "class of the largest body")
		if i > 0 && 4*size > 5*smaller {
			t.Errorf("class %d has bodies of %d bytes, the class before %d", i, size, smaller)
		}
		smaller = size
	}
	testkit.Equal(t, classSize(poolClasses-1), 64<<10, "largest body in a class")
}

func TestAMessageHasTheBodyOfItsClass(t *testing.T) {
	var p pool
	for i := range poolClasses {
		testkit.Equal(t, cap(p.get(classSize(i)).Body), classSize(i), "capacity of a new message's body")
	}
	m := p.get(100)
	if body := unsafe.SliceData(m.Body[:1]); uintptr(unsafe.Pointer(body)) != uintptr(unsafe.Pointer(m))+unsafe.Sizeof(*m) {
		t.Error("a small body is not in the allocation of its message")
	}
}
