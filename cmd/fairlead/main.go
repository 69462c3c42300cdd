// Command fairlead runs Kubernetes Services without the rest of Kubernetes; see
// 'fairlead --help'.
package main

import (
	"os"

	"github.com/fairlead/fairlead/internal/cli"
	_ "github.com/fairlead/fairlead/internal/runner/shim/early" // a Pod's shim starts small
)

func main() { os.Exit(cli.Main(os.Args[1:])) }
