package reliability

import (
	"fmt"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// Each object of the API is a register: it holds a value, each of which is written once, or
// is absent.

// verb is what a client asks for.
type verb int

const (
	get    verb = iota
	create      // unless it is there
	put         // whatever it holds
	patch       // whatever it holds
	swap        // if it holds what the client has read
	remove
)

func (v verb) String() string {
	return [...]string{"get", "create", "put", "patch", "swap", "delete"}[v]
}

// call is one request for an object.
type call struct {
	verb  verb
	key   string
	value string // that is written
	read  string // that swap expects
}

// result is what is known of a call.
type result int

const (
	unknown  result = iota // done, or not, or still to be done
	done                   // with the value, for get
	absent                 // there is none
	present                // it is there already
	conflict               // it holds another value than was expected
)

func (r result) String() string {
	return [...]string{"unknown", "done", "absent", "present", "conflict"}[r]
}

// reply is the result with the value that get has read.
type reply struct {
	result result
	value  string
}

// register is the model: the state is the value, "" for none.
func register() porcupine.Model {
	return porcupine.Model{
		Partition: func(all []porcupine.Operation) [][]porcupine.Operation {
			byKey := map[string][]porcupine.Operation{}
			for _, op := range all {
				key := op.Input.(call).key
				byKey[key] = append(byKey[key], op)
			}
			var out [][]porcupine.Operation
			for _, ops := range byKey {
				out = append(out, ops)
			}
			return out
		},
		Init: func() any { return "" },
		Step: func(state, input, output any) (bool, any) {
			ok, next := step(state.(string), input.(call), output.(reply))
			return ok, next
		},
		DescribeOperation: func(input, output any) string {
			c, r := input.(call), output.(reply)
			return fmt.Sprintf("%s %s %q %q: %s %q", c.verb, c.key, c.value, c.read, r.result, r.value)
		},
	}
}

// step reports whether a call can have a reply in a state, and what the state is afterwards. A
// call of an unknown result that changed nothing counts as one that comes after all others.
func step(state string, c call, r reply) (possible bool, next string) {
	var applies bool
	wrong := absent // the result of one that does not apply
	next = c.value
	switch c.verb {
	case get:
		applies, next = state != "" && (r.result != done || r.value == state), state
	case create:
		applies, wrong = state == "", present
	case put, patch:
		applies = state != ""
	case swap:
		if applies = state == c.read; state != "" {
			wrong = conflict
		}
	case remove:
		applies, next = state != "", ""
	}
	switch {
	case !applies && (r.result == unknown || r.result == wrong && (c.verb != get || state == "")):
		return true, state
	case applies && (r.result == unknown || r.result == done):
		return true, next
	}
	return false, state
}

// linearizable fails the test unless there is an order of all calls, each between its begin and
// its end, in which every reply is right.
func linearizable(t *testing.T, ops []porcupine.Operation) {
	t.Helper()
	switch found, info := porcupine.CheckOperationsVerbose(register(), ops, time.Minute); found {
	case porcupine.Ok:
	case porcupine.Unknown:
		t.Error("the history of the API is too long to be checked within a minute")
	default:
		file := t.ArtifactDir() + "/history.html"
		t.Errorf("the history of the API is not linearizable; it is drawn in %s: %v", file, porcupine.VisualizePath(register(), info, file))
	}
}

// The checker is worth nothing if it does not find what it looks for.
func TestRegisterFinds(t *testing.T) {
	op := func(begin, end int64, c call, r reply) porcupine.Operation {
		c.key = "a"
		return porcupine.Operation{Input: c, Call: begin, Output: r, Return: end}
	}
	const never = 1 << 40
	for name, tt := range map[string]struct {
		ops  []porcupine.Operation
		want bool
	}{
		"one after the other": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}), op(2, 3, call{verb: get}, reply{done, "1"}),
			op(4, 5, call{verb: swap, value: "2", read: "1"}, reply{result: done}), op(6, 7, call{verb: get}, reply{done, "2"}),
			op(8, 9, call{verb: remove}, reply{result: done}), op(10, 11, call{verb: get}, reply{result: absent}),
		}, true},
		"a write that is lost": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}), op(2, 3, call{verb: put, value: "2"}, reply{result: done}),
			op(4, 5, call{verb: get}, reply{done, "1"}),
		}, false},
		"a stale read": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}), op(2, 3, call{verb: remove}, reply{result: done}),
			op(4, 5, call{verb: get}, reply{done, "1"}),
		}, false},
		"two swaps of one value": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}),
			op(2, 5, call{verb: swap, value: "2", read: "1"}, reply{result: done}),
			op(2, 5, call{verb: swap, value: "3", read: "1"}, reply{result: done}),
		}, false},
		"a swap that is rejected without a reason": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}),
			op(2, 3, call{verb: swap, value: "2", read: "1"}, reply{result: conflict}),
		}, false},
		"created two times": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}), op(2, 3, call{verb: create, value: "2"}, reply{result: done}),
		}, false},
		"an unknown write that is seen late": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}), op(2, never, call{verb: put, value: "2"}, reply{}),
			op(4, 5, call{verb: get}, reply{done, "1"}), op(6, 7, call{verb: get}, reply{done, "2"}),
		}, true},
		"an unknown write that is seen and then not": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}), op(2, never, call{verb: put, value: "2"}, reply{}),
			op(4, 5, call{verb: get}, reply{done, "2"}), op(6, 7, call{verb: get}, reply{done, "1"}),
		}, false},
		"absent while nothing removed it": {[]porcupine.Operation{
			op(0, 1, call{verb: create, value: "1"}, reply{result: done}), op(2, 3, call{verb: get}, reply{result: absent}),
		}, false},
	} {
		if got := porcupine.CheckOperations(register(), tt.ops); got != tt.want {
			t.Errorf("%s: linearizable is %v", name, got)
		}
	}
}
