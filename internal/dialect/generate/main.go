// Generate writes docs/annotations.md to the file that is its argument.
package main

import (
	"fmt"
	"os"

	"github.com/fairlead/fairlead/internal/dialect"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate FILE")
		os.Exit(2)
	}
	if err := os.WriteFile(os.Args[1], []byte(dialect.Document()), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
