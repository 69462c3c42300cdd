package store

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Column is a column of the table that kubectl get prints.
type Column struct {
	Name string
	// Type is "string", "integer" or "number"; empty means string.
	Type string
	// Wide columns are printed with -o wide only.
	Wide bool
	// IsName marks the column with the object's name in a table that does not
	// begin with it.
	IsName bool
	// Description is shown to clients that ask for the table itself.
	Description string
}

// AgeColumn is the time since the object was made.
func AgeColumn() Column {
	return Column{Name: "Age", Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"]}
}

// NewTable shows objects of type T as rows. The first column is always the
// name and is not listed in columns; cells returns the values of the others in
// order.
func NewTable[T runtime.Object](columns []Column, cells func(T) []any) rest.TableConvertor {
	all := append([]Column{{Name: "Name", IsName: true, Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]}}, columns...)
	return NewNamelessTable(all, func(obj T) []any {
		name := ""
		if m, err := meta.Accessor(obj); err == nil {
			name = m.GetName()
		}
		return append([]any{name}, cells(obj)...)
	})
}

// NewNamelessTable is NewTable for kinds whose rows do not begin with the name.
func NewNamelessTable[T runtime.Object](columns []Column, cells func(T) []any) rest.TableConvertor {
	defs := make([]metav1.TableColumnDefinition, 0, len(columns))
	for _, c := range columns {
		d := metav1.TableColumnDefinition{Name: c.Name, Type: c.Type, Description: c.Description}
		if d.Type == "" {
			d.Type = "string"
		}
		if c.Wide {
			d.Priority = 1
		}
		if c.IsName {
			d.Format = "name"
		}
		defs = append(defs, d)
	}
	return &table[T]{defs: defs, cells: cells}
}

// WithConditions adds to the rows of t, a table of objects of type T, what
// conditions returns for them.
func WithConditions[T runtime.Object](t rest.TableConvertor, conditions func(T) []metav1.TableRowCondition) rest.TableConvertor {
	with := *t.(*table[T])
	with.conditions = conditions
	return &with
}

type table[T runtime.Object] struct {
	defs  []metav1.TableColumnDefinition
	cells func(T) []any
	// conditions may be nil.
	conditions func(T) []metav1.TableRowCondition
}

// ConvertToTable turns an object or a list into rows.
func (t *table[T]) ConvertToTable(_ context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	out := &metav1.Table{}
	if o, ok := options.(*metav1.TableOptions); !ok || !o.NoHeaders {
		out.ColumnDefinitions = t.defs
	}
	add := func(o runtime.Object) error {
		typed, ok := o.(T)
		if !ok {
			return fmt.Errorf("cannot show a %T as a row of this table", o)
		}
		row := metav1.TableRow{Cells: t.cells(typed), Object: runtime.RawExtension{Object: o}}
		if t.conditions != nil {
			row.Conditions = t.conditions(typed)
		}
		out.Rows = append(out.Rows, row)
		return nil
	}
	if meta.IsListType(obj) {
		list, err := meta.ListAccessor(obj)
		if err != nil {
			return nil, err
		}
		out.ResourceVersion, out.Continue = list.GetResourceVersion(), list.GetContinue()
		out.RemainingItemCount = list.GetRemainingItemCount()
		return out, meta.EachListItem(obj, add)
	}
	if m, err := meta.CommonAccessor(obj); err == nil {
		out.ResourceVersion = m.GetResourceVersion()
	}
	return out, add(obj)
}

// Age is the time since t as kubectl shows it, for example "5m".
func Age(t metav1.Time) string {
	if t.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(time.Since(t.Time))
}

// OrNone is s, or "<none>" when s is empty.
func OrNone(s string) string {
	if s == "" {
		return "<none>"
	}
	return s
}
