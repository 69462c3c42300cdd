// Package early makes a program the shim of a Pod when its first argument is
// "pod-shim", before the rest of the program is initialized. A program imports it for
// only that effect.
//
// A package is initialized as soon as all that it imports is, in the order of the
// import paths (The Go Programming Language Specification, Program initialization),
// so most of the packages of a large program come after this one: their tables and
// maps, several megabytes for each Pod, are never made.
package early

import (
	"os"

	"github.com/fairlead/fairlead/internal/runner/shim"
)

func init() { //nolint:gochecknoinits // main would be too late, see above
	if len(os.Args) > 1 && os.Args[1] == "pod-shim" {
		os.Exit(shim.Main(os.Args[2:]))
	}
}
