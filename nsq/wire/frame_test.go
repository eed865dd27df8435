package wire

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestParseFrameRefusals(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   string
		why  string
	}{
		{"no room for the type", u32(3), "size 3 is outside [4, 104]"},
		{"empty", u32(0), "size 0 is outside [4, 104]"},
		{"too large, from its size alone", u32(105), "size 105 is outside [4, 104]"},
		{"negative", u32(math.MaxUint32), "outside [4, 104]"},
		{"unknown type, before its data", u32(10) + u32(3), "type 3"},
		{"negative type", u32(4) + u32(math.MaxUint32), "type -1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			kind, data, n, err := ParseFrame([]byte(tc.in), 100)
			if !errors.Is(err, ErrFrame) || kind != 0 || data != nil || n != 0 {
				t.Fatalf("kind=%v data=%q n=%d err=%v, want ErrFrame alone", kind, data, n, err)
			}
			if !strings.Contains(err.Error(), tc.why) {
				t.Errorf("%q does not say %q", err, tc.why)
			}
		})
	}
	if _, data, n, err := ParseFrame([]byte(u32(104)+u32(0)+strings.Repeat("x", 100)), 100); err != nil || n != 108 || len(data) != 100 {
		t.Errorf("data of exactly the limit: %d bytes, n=%d, %v", len(data), n, err)
	}
}

func TestFrameSizeIsKnownFromFourBytes(t *testing.T) {
	frame := AppendResponse(nil, "hello")
	for k := range frame {
		size, err := FrameSize(frame[:k], 100)
		want := 0
		if k >= 4 {
			want = len(frame)
		}
		if size != want || err != nil {
			t.Errorf("of %d bytes: %d, %v, want %d", k, size, err, want)
		}
	}
}

func TestParseMessageRefusesLessThanAHeader(t *testing.T) {
	var id MessageID
	frame := AppendMessage(nil, 1, 1, id, nil)
	if len(frame) != MessageFrameSize(0) {
		t.Errorf("an empty message takes %d bytes, MessageFrameSize says %d", len(frame), MessageFrameSize(0))
	}
	data := frame[FrameOverhead:]
	for k := range data {
		if m, err := ParseMessage(data[:k]); !errors.Is(err, ErrMessage) || m.Body != nil {
			t.Errorf("of %d bytes: %+v, %v, want ErrMessage", k, m, err)
		}
	}
	if m, err := ParseMessage(data); err != nil || len(m.Body) != 0 {
		t.Errorf("of its header alone: %+v, %v", m, err)
	}
}

func TestFrameTypeStrings(t *testing.T) {
	for kind, want := range map[FrameType]string{
		FrameResponse: "response", FrameError: "error", FrameMessage: "message", 7: "frame type 7",
	} {
		if got := kind.String(); got != want {
			t.Errorf("%d is %q, want %q", int32(kind), got, want)
		}
	}
}

func TestErrorFatality(t *testing.T) {
	fatal := []ErrorCode{CodeInvalid, CodeBadProtocol, CodeBadBody, CodeBadTopic, CodeBadChannel, CodeBadMessage,
		CodePubFailed, CodeMpubFailed, CodeDpubFailed, CodeSubFailed, CodeIdentifyFailed,
		CodeAuthDisabled, CodeAuthFirst, CodeAuthFailed, CodeUnauthorized, "E_SOMETHING_NEW", ""}
	keep := []ErrorCode{CodeFinFailed, CodeReqFailed, CodeTouchFailed, CodeRateLimited, CodeQueueFull}
	for want, codes := range map[bool][]ErrorCode{true: fatal, false: keep} {
		for _, code := range codes {
			if code.Fatal() != want {
				t.Errorf("%q.Fatal() = %v", code, !want)
			}
			if NewError(code, "x").Fatal != want || Wrap(code, "x", errors.New("y")).Fatal != want || ParseError([]byte(code)).Fatal != want {
				t.Errorf("%q: an Error does not carry the code's verdict %v", code, want)
			}
		}
	}
}

func TestErrorKeepsItsCauseToItself(t *testing.T) {
	cause := errors.New("disk /secret/path is full")
	e := Wrap(CodePubFailed, "PUB failed", cause)
	testkit.Equal(t, e.Error(), "E_PUB_FAILED PUB failed: disk /secret/path is full", "for us it reads")
	testkit.ErrorIs(t, e, cause, "the cause is not found in the error")
	testkit.Equal(t, string(AppendError(nil, e)[FrameOverhead:]), "E_PUB_FAILED PUB failed", "sent")
	testkit.Equal(t, string(AppendError(nil, NewError(CodeInvalid, ""))[FrameOverhead:]), "E_INVALID", "without a text was sent")
}

func TestRateLimitedCarriesItsHint(t *testing.T) {
	for _, tc := range []struct{ after, hint time.Duration }{
		{0, 0},
		{-time.Second, 0},
		{1, time.Millisecond},
		{time.Millisecond, time.Millisecond},
		{time.Millisecond + 1, 2 * time.Millisecond},
		{90 * time.Second, 90 * time.Second},
		{math.MaxInt64, math.MaxInt64 / time.Millisecond * time.Millisecond},
	} {
		_, data, _, err := ParseFrame(AppendError(nil, RateLimited(tc.after)), 100)
		testkit.Must(t, err)
		e := ParseError(data)
		if hint, ok := e.RetryAfter(); !ok || hint != tc.hint || e.Code != CodeRateLimited || e.Fatal {
			t.Errorf("%v arrives as %q with hint %v %v, want %v", tc.after, e, hint, ok, tc.hint)
		}
	}
	for _, e := range []*Error{
		NewError(CodeQueueFull, "retry_after_ms=5"),
		NewError(CodeRateLimited, ""),
		NewError(CodeRateLimited, "retry_after_ms="),
		NewError(CodeRateLimited, "retry_after_ms=-5"),
		NewError(CodeRateLimited, "retry_after_ms=5s"),
		NewError(CodeRateLimited, "retry_after_ms=9999999999999999999"),
	} {
		if d, ok := e.RetryAfter(); ok {
			t.Errorf("%q has a hint of %v", e, d)
		}
	}
}

func TestLimitsValidate(t *testing.T) {
	if err := DefaultLimits().Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	err := Limits{MaxReqTimeout: -1, MaxDeferTimeout: -1}.Validate()
	if err == nil {
		t.Fatal("five faults were taken")
	}
	for _, want := range []string{"--max-msg-size", "--max-body-size", "--max-req-timeout", "--max-defer-timeout", "--max-rdy-count"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not speak of the %s", err, want)
		}
	}
}

// A command is copied on every message, so its fields must stay views.
func TestCommandStaysSmall(t *testing.T) {
	if got := unsafe.Sizeof(Command{}); got > 144 {
		t.Errorf("a Command is %d bytes", got)
	}
}
