package dialect

import (
	"os"
	"testing"
)

func TestDocumentIsGenerated(t *testing.T) {
	have, err := os.ReadFile("../../docs/annotations.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != Document() {
		t.Error("docs/annotations.md is not what the tables say: run go generate ./internal/dialect")
	}
}
