// Command fairlead-shim is the parent process of one Pod, as a separate program:
// 'make build' puts it into fairlead, which starts it for each Pod (package
// internal/runner/shim/embedded). It is not for use by hand.
package main

import (
	"os"

	"github.com/fairlead/fairlead/internal/runner/shim"
)

func main() { os.Exit(shim.Main(os.Args[1:])) }
