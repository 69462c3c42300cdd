package ipvs

import (
	"testing"

	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// What is read back of single frontends is what the Table has, in every state.
func TestLook(t *testing.T) { flows.Looks(t, flows.States(1), inside) }
