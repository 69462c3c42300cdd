// Command generate writes the manual pages and the completions of fairlead for packages,
// into the directory that is its argument: man1, and completions. They carry the time of
// SOURCE_DATE_EPOCH (https://reproducible-builds.org/specs/source-date-epoch/).
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/fairlead/fairlead/internal/cli"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return errors.New("usage: generate DIRECTORY")
	}
	made := time.Now()
	if text := os.Getenv("SOURCE_DATE_EPOCH"); text != "" {
		seconds, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
		}
		made = time.Unix(seconds, 0)
	}
	pages, completions := filepath.Join(os.Args[1], "man1"), filepath.Join(os.Args[1], "completions")
	for _, dir := range []string{pages, completions} {
		if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // world-readable
			return err
		}
	}
	if err := cli.WriteManPages(pages, made.UTC()); err != nil {
		return err
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		var text bytes.Buffer
		if err := cli.WriteCompletion(&text, shell); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(completions, shell), text.Bytes(), 0o644); err != nil { //nolint:gosec // as above
			return err
		}
	}
	return nil
}
