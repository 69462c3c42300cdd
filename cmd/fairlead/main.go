// Command fairlead is Kubernetes Services as a system of its own; see
// 'fairlead --help'.
package main

import (
	"os"

	"github.com/fairlead/fairlead/internal/cli"
	"github.com/fairlead/fairlead/internal/runner"
)

func main() {
	// The process that stands over one Pod is this program again; it must start
	// small, so it comes before everything else.
	if len(os.Args) > 1 && os.Args[1] == "pod-shim" {
		os.Exit(runner.ShimMain(os.Args[2:]))
	}
	os.Exit(cli.Main(os.Args[1:]))
}
