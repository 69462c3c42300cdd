package shim

import (
	"encoding/json"
	"strings"
	"testing"
)

// The shims of earlier versions, which later agents adopt, know a confinement by the key walls.
func TestKeyOfConfinement(t *testing.T) {
	b, err := json.Marshal(Container{Confinement: &Confinement{IDs: &IDs{Base: 7}}})
	if err != nil || !strings.Contains(string(b), `"walls":{`) || !strings.Contains(string(b), `"base":7`) {
		t.Errorf("%s, %v", b, err)
	}
}
