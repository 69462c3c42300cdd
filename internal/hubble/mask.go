package hubble

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
)

// mask is the fields of a message that a client wants; nil for all.
type mask struct{ fields map[protoreflect.Name]*mask }

// newMask returns the mask of a request, nil if it has none.
func newMask(m *fieldmaskpb.FieldMask) (*mask, error) {
	if len(m.GetPaths()) == 0 {
		return nil, nil
	}
	if _, err := fieldmaskpb.New(&flow.Flow{}, m.GetPaths()...); err != nil {
		return nil, fmt.Errorf("field_mask: %w", err)
	}
	out := &mask{fields: map[protoreflect.Name]*mask{}}
	for _, p := range m.GetPaths() {
		out.add(strings.Split(p, "."))
	}
	return out, nil
}

func (m *mask) add(way []string) {
	name := protoreflect.Name(way[0])
	below, known := m.fields[name]
	switch {
	case len(way) == 1:
		m.fields[name] = nil
	case known && below == nil: // the whole field is wanted
	default:
		if below == nil {
			below = &mask{fields: map[protoreflect.Name]*mask{}}
			m.fields[name] = below
		}
		below.add(way[1:])
	}
}

// apply clears all other fields of a flow.
func (m *mask) apply(f *flow.Flow) {
	if m != nil {
		m.clear(f.ProtoReflect())
	}
}

func (m *mask) clear(of protoreflect.Message) {
	of.Range(func(d protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		below, wanted := m.fields[d.Name()]
		switch {
		case !wanted:
			of.Clear(d)
		case below != nil && d.Message() != nil && !d.IsList():
			below.clear(v.Message())
		}
		return true
	})
}
