package loop

import "testing"

func TestSignal(t *testing.T) {
	s := NewSignal()
	s.Set()
	s.Set() // does not block
	<-s
	select {
	case <-s:
		t.Error("two Sets before a receive woke twice")
	default:
	}
}
