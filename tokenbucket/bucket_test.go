package tokenbucket_test

import (
	"testing"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tokenbucket"
)

const second = stamp.Mono(1e9)

func TestABurstPassesAndTheRestIsPaced(t *testing.T) {
	// 1000 msg/s, so a token each millisecond.
	b := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 3}, 0)
	for i, want := range []stamp.Mono{0, 0, 0, 1e6, 2e6, 3e6} {
		if got := b.Eligible(0); got != want {
			t.Fatalf("message %d would be eligible at %d, want %d", i, got, want)
		}
		if got := b.Take(0); got != want {
			t.Fatalf("message %d is eligible at %d, want %d", i, got, want)
		}
	}
	if got := b.Tokens(0); got != -3*tokenbucket.Token {
		t.Errorf("holds %d at 0, want a debt of 3 tokens", got)
	}
	if got := b.Tokens(3e6 + 500_000); got != 500 {
		t.Errorf("holds %d half a token time after the last, want 500", got)
	}
	if got := b.Tokens(10 * second); got != 3000 {
		t.Errorf("holds %d after a long pause, want its burst", got)
	}
}

func TestANewBucketIsEmpty(t *testing.T) {
	b := tokenbucket.New(tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 3}, 5*second)
	if got := b.Tokens(5 * second); got != 0 {
		t.Errorf("holds %d, want none", got)
	}
	if got, want := b.Take(4*second), 5*second+1e6; got != want {
		t.Errorf("first message is eligible at %d, want %d", got, want)
	}
}

func TestTheZeroBucketAdmitsNothing(t *testing.T) {
	var b tokenbucket.Bucket
	if got := b.Eligible(7); got != stamp.Never {
		t.Errorf("eligible at %d, want Never", got)
	}
	if got := b.Take(7); got != stamp.Never {
		t.Errorf("taken at %d, want Never", got)
	}
	if got := b.Tokens(second); got != 0 {
		t.Errorf("holds %d, want none", got)
	}
	if got := b.Share(); !got.IsZero() {
		t.Errorf("share %v, want the zero share", got)
	}
}

func TestRetuneKeepsWhatFitsAndReturnsTheRest(t *testing.T) {
	b := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 10}, 0)
	b.Take(0)
	half := tokenbucket.Share{Rate: tokenbucket.PerSecond(500), Burst: 4}
	if got := b.Retune(500_000, half, 0); got != 5500 {
		t.Errorf("gave up %d, want 5500 of 9500", got)
	}
	if got := b.Tokens(500_000); got != 4000 {
		t.Errorf("kept %d, want 4000", got)
	}
	if got := b.Retune(500_000, tokenbucket.Share{Rate: tokenbucket.PerSecond(500), Burst: 6}, 3000); got != 1000 {
		t.Errorf("gave back %d of a grant of 3000 with room for 2000, want 1000", got)
	}
	if got := b.Retune(500_000, tokenbucket.Share{}, 0); got != 6000 {
		t.Errorf("gave up %d on losing the share, want 6000", got)
	}
	if got := b.Eligible(second); got != stamp.Never {
		t.Errorf("eligible at %d without a share, want Never", got)
	}
}
