package envoyauth

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"

	"google.golang.org/protobuf/encoding/protowire"
)

// Answer is what a server answers (CheckResponse).
type Answer struct {
	// Allowed reports whether the request may pass. Otherwise Status, Fields and Body are for the client.
	Allowed bool
	Status  int
	Body    []byte
	// Fields are for the client, or else for the Pod, which does not get the fields in Remove.
	Fields []Field
	Remove []string
	// Back are for the answer of the Pod.
	Back []Field
	// Query has parameters to be set, and Drop the names of others that the Pod does not get.
	Query []Parameter
	Drop  []string
}

// Parameter is one of a query.
type Parameter struct{ Name, Value string }

// Field is a header field with what becomes of others of its name.
type Field struct {
	Name, Value string
	How         How
}

// How is what becomes of the fields that have the name of a new one.
type How int

// The ways.
const (
	Replace   How = iota // they go
	Append               // they stay
	IfAbsent             // if there is one, the new one is left out
	IfPresent            // they go, and if there is none the new one is left out
)

// maxChanges bounds the fields, names and parameters of an answer.
const maxChanges = 256

// ErrServer means that the server could not decide.
var ErrServer = errors.New("the server reports an error")

// The numbers of the fields of CheckResponse.
const (
	checkStatus = 1 // of google.rpc.Status
	checkDenied = 2 // DeniedHttpResponse
	checkOK     = 3 // OkHttpResponse
	checkError  = 5 // DeniedHttpResponse
)

// Read reads the messages of an answer of gRPC, which are one. A request may pass if the status is 0 and nothing is there for a denied
// one; an answer without either does not decide.
func Read(b []byte) (*Answer, error) {
	if len(b) < framing || b[0] != 0 || int(binary.BigEndian.Uint32(b[1:])) != len(b)-framing {
		return nil, errors.New("want one message that is not compressed")
	}
	decided, code, which, about := false, uint64(0), protowire.Number(0), []byte(nil)
	err := each(b[framing:], func(n protowire.Number, v value) (err error) {
		switch n {
		case checkStatus: // of several, one that forbids counts
			var c uint64
			if c, err = first(v.bytes); c != 0 {
				code = c
			}
			decided = true
		case checkDenied, checkOK, checkError: // the last one counts
			decided, which, about = true, n, v.bytes
		}
		return err
	})
	a := &Answer{Allowed: code == 0 && which != checkDenied}
	switch {
	case err != nil:
	case !decided:
		err = errors.New("it has no status")
	case which == checkError:
		err = ErrServer
	case a.Allowed:
		err = each(about, a.allowed)
	default:
		if a.Status = http.StatusForbidden; which == checkDenied {
			err = each(about, a.denied)
		}
	}
	if n := len(a.Fields) + len(a.Remove) + len(a.Back) + len(a.Query) + len(a.Drop); err == nil && n > maxChanges {
		err = fmt.Errorf("it has more than %d fields", maxChanges)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

// denied reads a field of DeniedHttpResponse.
func (a *Answer) denied(n protowire.Number, v value) error {
	switch n {
	case 1: // status, of type.v3.HttpStatus
		code, err := first(v.bytes)
		if hasBody(code) {
			a.Status = int(code) //nolint:gosec // bounded
		}
		return err
	case 2: // headers
		return field(v.bytes, &a.Fields)
	case 3: // body
		a.Body = v.bytes
	}
	return nil
}

// hasBody reports whether an answer with a status has a body.
func hasBody(status uint64) bool {
	return status >= 200 && status < 600 && status != http.StatusNoContent && status != http.StatusResetContent &&
		status != http.StatusNotModified
}

// allowed reads a field of OkHttpResponse.
func (a *Answer) allowed(n protowire.Number, v value) error {
	switch n {
	case 2: // headers
		return field(v.bytes, &a.Fields)
	case 5: // headers_to_remove
		a.Remove = append(a.Remove, string(v.bytes))
	case 6: // response_headers_to_add
		return field(v.bytes, &a.Back)
	case 7: // query_parameters_to_set
		name, value, err := pair(v.bytes)
		a.Query = append(a.Query, Parameter{name, value})
		return err
	case 8: // query_parameters_to_remove
		a.Drop = append(a.Drop, string(v.bytes))
	}
	return nil
}

// field reads a config.core.v3.HeaderValueOption. In these messages a field that says nothing replaces others.
func field(b []byte, to *[]Field) error {
	var f Field
	err := each(b, func(n protowire.Number, v value) (err error) {
		switch n {
		case 1: // header
			f.Name, f.Value, err = pair(v.bytes)
		case 2: // append, of google.protobuf.BoolValue
			var does uint64
			if does, err = first(v.bytes); does != 0 {
				f.How = Append
			}
		case 3: // append_action
			switch v.number {
			case 1:
				f.How = IfAbsent
			case 3:
				f.How = IfPresent
			}
		}
		return err
	})
	*to = append(*to, f)
	return err
}

// pair reads the name and the value of a config.core.v3.HeaderValue, also of bytes, or of a QueryParameter.
func pair(b []byte) (name, text string, err error) {
	err = each(b, func(n protowire.Number, v value) error {
		switch {
		case n == 1:
			name = string(v.bytes)
		case n == 2, n == 3 && text == "":
			text = string(v.bytes)
		}
		return nil
	})
	return name, text, err
}

// first returns the number that is the first field of a message.
func first(b []byte) (out uint64, err error) {
	err = each(b, func(n protowire.Number, v value) error {
		if n == 1 {
			out = v.number
		}
		return nil
	})
	return out, err
}

// value is that of a field: a number, or else bytes.
type value struct {
	number uint64
	bytes  []byte
}

// each calls do with the fields of a message. Those of other types than numbers and bytes have the zero value.
func each(b []byte, do func(protowire.Number, value) error) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		var v value
		switch kind {
		case protowire.VarintType:
			v.number, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			v.bytes, n = protowire.ConsumeBytes(b)
		default:
			n = protowire.ConsumeFieldValue(number, kind, b)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if err := do(number, v); err != nil {
			return err
		}
	}
	return nil
}
