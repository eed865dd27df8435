package service

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
)

// ErrorDomain is the ErrorInfo domain of SRTM's services.
const ErrorDomain = "srtm.io"

// ReasonBadRequest is the reason of Faults.
const ReasonBadRequest = "BAD_REQUEST"

// ErrorRow maps errors to a code and a reason, which is part of the API. Make it with ErrorIs or
// ErrorAs.
type ErrorRow struct {
	matches func(error) bool
	code    codes.Code
	reason  string
}

// ErrorIs returns the row of a sentinel.
func ErrorIs(target error, code codes.Code, reason string) ErrorRow {
	return ErrorRow{func(err error) bool { return errors.Is(err, target) }, code, reason}
}

// ErrorAs returns the row of a type.
func ErrorAs[E error](code codes.Code, reason string) ErrorRow {
	return ErrorRow{func(err error) bool {
		var target E
		return errors.As(err, &target)
	}, code, reason}
}

// ErrorTable is the table of a service. The first matching row counts.
type ErrorTable []ErrorRow

// Status returns err with its code and details; nil for nil. describe, unless nil, adds
// the service's details beside the reason. Faults need no row.
func (t ErrorTable) Status(err error, describe func(error, *errdetails.ErrorInfo) []protoadapt.MessageV1) error {
	if err == nil {
		return nil
	}
	var bad Faults
	if errors.As(err, &bad) {
		return CodedError(codes.InvalidArgument, err, &errdetails.ErrorInfo{Reason: ReasonBadRequest, Domain: ErrorDomain}, bad.Details())
	}
	for _, row := range t {
		if row.matches(err) {
			info := &errdetails.ErrorInfo{Reason: row.reason, Domain: ErrorDomain}
			details := []protoadapt.MessageV1{info}
			if describe != nil {
				details = append(details, describe(err, info)...)
			}
			return CodedError(row.code, err, details...)
		}
	}
	for _, ended := range []error{context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, ended) {
			return status.FromContextError(ended).Err()
		}
	}
	if s, ok := status.FromError(err); ok {
		return s.Err() // of the stream itself
	}
	return status.Error(codes.Internal, err.Error())
}

// CodedError returns a status with details.
func CodedError(code codes.Code, err error, details ...protoadapt.MessageV1) error {
	s := status.New(code, err.Error())
	detailed, detailErr := s.WithDetails(details...)
	if detailErr != nil {
		return s.Err() // the code and the text stay without the details
	}
	return detailed.Err()
}

// Fault is one problem of a request. Field is a path in the request message, with the
// names of the .proto file.
type Fault struct{ Field, Problem string }

// Faults are all problems of a request, in the order of its fields.
type Faults []Fault

// MaxFaults bounds the violations listed in one answer, because a request with a million
// publishers can have as many faults.
const MaxFaults = 100

// Add adds a fault.
func (f *Faults) Add(field, format string, args ...any) {
	*f = append(*f, Fault{field, fmt.Sprintf(format, args...)})
}

// Name adds a fault unless name is a valid name of a topic, a channel or a broker. It
// reports whether name is valid.
func (f *Faults) Name(field, name string) bool {
	valid := len(name) >= 1 && len(name) <= 64
	for _, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_', c == '-':
		default:
			valid = false
		}
	}
	if !valid {
		f.Add(field, "%.80q: want 1 to 64 of [.a-zA-Z0-9_-]", name)
	}
	return valid
}

// Err returns nil without faults.
func (f Faults) Err() error {
	if len(f) == 0 {
		return nil
	}
	return f
}

func (f Faults) Error() string {
	const shown = 10
	var b strings.Builder
	for i, fault := range f {
		if i > 0 {
			b.WriteString("; ")
		}
		if i == shown {
			fmt.Fprintf(&b, "and %d more", len(f)-shown)
			break
		}
		b.WriteString(fault.Field + ": " + fault.Problem)
	}
	return b.String()
}

// Details returns the faults as a message.
func (f Faults) Details() *errdetails.BadRequest {
	p := &errdetails.BadRequest{}
	for i, fault := range f {
		if i == MaxFaults {
			fault = Fault{"spec", fmt.Sprintf("%d more faults", len(f)-MaxFaults)}
		}
		p.FieldViolations = append(p.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: fault.Field, Description: fault.Problem})
		if i == MaxFaults {
			break
		}
	}
	return p
}
