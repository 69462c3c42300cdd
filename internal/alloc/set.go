package alloc

import (
	"math/bits"
	"math/rand/v2"
)

const (
	wordBits = 6
	wordSize = 1 << wordBits
	// probes is how many random offsets are tried before the exact search. In
	// a half full set all of them fail once in 256 choices.
	probes = 8
)

// set is a sparse set of offsets below size, with an exact uniform choice among
// the offsets that are not in it.
//
// Level 0 of counts is a bitmap in words of 64 offsets; level n counts the
// members below each block of 64^(n+1) offsets. Blocks without members have no
// entry, so that memory follows the number of members.
type set struct {
	size  uint64
	words map[uint64]uint64
	// counts[i] is keyed by offset >> (wordBits * (i+2)).
	counts []map[uint64]uint64
	used   uint64
}

func newSet(size uint64) *set {
	s := &set{size: size, words: map[uint64]uint64{}}
	for shift := uint(2 * wordBits); shift < 64+wordBits; shift += wordBits {
		s.counts = append(s.counts, map[uint64]uint64{})
		if shift >= 64 || size>>shift == 0 {
			break
		}
	}
	return s
}

func (s *set) has(off uint64) bool {
	return s.words[off>>wordBits]&(1<<(off%wordSize)) != 0
}

// add puts off into the set and reports whether it was not there before.
func (s *set) add(off uint64) bool {
	if s.has(off) {
		return false
	}
	s.words[off>>wordBits] |= 1 << (off % wordSize)
	for i := range s.counts {
		s.counts[i][block(off, i)]++
	}
	s.used++
	return true
}

// remove takes off out of the set and reports whether it was there.
func (s *set) remove(off uint64) bool {
	if !s.has(off) {
		return false
	}
	w := off >> wordBits
	if s.words[w] &^= 1 << (off % wordSize); s.words[w] == 0 {
		delete(s.words, w)
	}
	for i := range s.counts {
		b := block(off, i)
		if s.counts[i][b]--; s.counts[i][b] == 0 {
			delete(s.counts[i], b)
		}
	}
	s.used--
	return true
}

// block is the index of the block of counts[level] that holds off. A shift by
// 64 or more is 0 in Go, which is the one block of the top level.
func block(off uint64, level int) uint64 { return off >> (wordBits * uint(level+2)) }

// pick returns a random offset that is not in the set, or false when the set
// is full.
func (s *set) pick() (uint64, bool) {
	if s.used >= s.size {
		return 0, false
	}
	for range probes {
		if off := rand.Uint64N(s.size); !s.has(off) {
			return off, true
		}
	}
	return s.nthFree(rand.Uint64N(s.size - s.used)), true
}

// nthFree returns the offset with exactly n free offsets below it. n must be
// less than the number of free offsets.
func (s *set) nthFree(n uint64) uint64 {
	var base uint64
	for level := len(s.counts) - 2; level >= -1; level-- {
		shift := wordBits * uint(level+2)
		for child := base >> shift; ; child++ {
			free := s.freeIn(child, shift, level)
			if n < free {
				base = child << shift
				break
			}
			n -= free
		}
	}
	free := ^s.words[base>>wordBits]
	for ; n > 0; n-- {
		free &= free - 1
	}
	return base + uint64(bits.TrailingZeros64(free))
}

// freeIn counts the free offsets of one block of 1<<shift offsets. Level -1 is
// the bitmap. Of the last block it also counts offsets that are not below s.size:
// nthFree looks for one that is, so it goes no further for that.
func (s *set) freeIn(child uint64, shift uint, level int) uint64 {
	size := uint64(1) << shift
	if level < 0 {
		return size - uint64(bits.OnesCount64(s.words[child]))
	}
	return size - s.counts[level][child]
}
