package rotation

import (
	"errors"
	"testing"
)

// Servers that have the old key learn the new one while it is needed, and not afterwards; without
// the old key nothing is read.
func TestSealedState(t *testing.T) {
	d, both := directory(t, t.TempDir())
	other, _ := directory(t, t.TempDir())
	had := d.Bundle()
	for _, step := range []Step{Trust, Sign, Back, Done} {
		secret := sealedAt(t, step, both, 1)
		got, _, err := open(secret, had)
		switch {
		case step == Done:
			if !errors.Is(err, errSealed) {
				t.Errorf("the new authority's key is still there at the end: %v", err)
			}
			if _, _, err := open(secret, both); err != nil {
				t.Errorf("a server that has both keys cannot read the end: %v", err)
			}
		case err != nil || got.Authorities[1].Key == nil || !got.Authorities[1].Cert.Equal(both.Authorities[1].Cert):
			t.Errorf("%s: the new authority: %+v, %v", step, got, err)
		}
		if _, _, err := open(secret, other.Bundle()); !errors.Is(err, errSealed) {
			t.Errorf("%s: opened with the key of another authority: %v", step, err)
		}
	}
}
