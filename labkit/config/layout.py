"""How many ranks each way of cutting a model gets."""

from dataclasses import dataclass

from labkit.config.checks import named, require_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism; `pp * dp * cp * tp` ranks in all.

    Experts are spread over `ep` ranks taken from the data and context ranks, so
    that `ep` adds none.
    """

    pp: int = 1
    """Pipeline stages."""

    dp: int = 1
    """Data-parallel replicas."""

    tp: int = 1
    """Tensor-parallel ranks."""

    ep: int = 1
    """Expert-parallel ranks."""

    cp: int = 1
    """Context-parallel ranks."""

    vpp: int = 1
    """Virtual pipeline stages per rank (interleaving)."""

    def __post_init__(self) -> None:
        require_whole(named(self, "pp", "dp", "tp", "ep", "cp", "vpp"))
        if (self.dp * self.cp * self.tp) % self.ep:
            raise ValueError(
                "ep must divide dp * cp * tp, because experts are spread over the "
                f"ranks that hold one stage; got ep={self.ep} and "
                f"{self.dp} * {self.cp} * {self.tp} = {self.dp * self.cp * self.tp}. "
                f"Set dp={self.ep} or another multiple."
            )

    @property
    def n_ranks(self) -> int:
        """Processes that the layout takes.

        >>> Layout(pp=16, dp=128, ep=64).n_ranks
        2048
        """
        return self.pp * self.dp * self.cp * self.tp

    def check_world(self, world_size: int) -> None:
        """Raise ValueError unless the layout takes exactly `world_size` ranks."""
        require_whole({"world_size": world_size})
        if self.n_ranks == world_size:
            return
        message = (
            "pp * dp * cp * tp must equal the number of ranks: "
            f"{self.pp} * {self.dp} * {self.cp} * {self.tp} = {self.n_ranks}, but "
            f"{world_size} ranks are running."
        )
        fixed = self.pp * self.cp * self.tp
        if world_size % fixed == 0:
            message += (
                f" With pp={self.pp}, cp={self.cp} and tp={self.tp}, set "
                f"dp={world_size // fixed}."
            )
        else:
            message += f" Start a multiple of {fixed} ranks."
        raise ValueError(message)
